//! Options of conversations as training data.

use std::path::PathBuf;

use zero_config::{ChatType, ExcessLength, TrainOnEos, Untrained};

/// How conversations become samples: the keys of `data.chat`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatOptions {
    /// The layout of the records.
    pub kind: ChatType,
    /// The text of a Jinja template, or the path of its file. `None` is the template beside the tokenizer, or in
    /// `pretrained`.
    pub chat_template: Option<String>,
    /// A folder that may have a template, besides the tokenizer's.
    pub pretrained: Option<PathBuf>,
    /// Field of a record that holds the messages; `None` is `messages`, or else `conversations`.
    pub field_messages: Option<String>,
    /// Field of a message that holds its role; `None` is `role`, or else `from`.
    pub field_role: Option<String>,
    /// Field of a message that holds its text; `None` is `content`, or else `value`.
    pub field_content: Option<String>,
    /// Field of a message that decides whether it is trained, whatever its role.
    pub field_training: String,
    /// Each role that templates know, with its names in the files.
    pub roles: Vec<(String, Vec<String>)>,
    /// Roles, or their names, whose messages are trained.
    pub roles_to_train: Vec<String>,
    /// Train every token.
    pub train_on_inputs: bool,
    /// Which end-of-turn tokens are trained.
    pub train_on_eos: TrainOnEos,
    /// Reaction to a conversation of more than `sequence_length + 1` tokens.
    pub excess_length: ExcessLength,
    /// Reaction to a conversation without a trained token.
    pub untrained: Untrained,
}

impl Default for ChatOptions {
    /// Returns the defaults of the keys: the model's own template, and assistant messages are trained.
    fn default() -> Self {
        let role = |role: &str, names: &[&str]| (role.into(), names.iter().map(|&name| name.into()).collect());
        Self {
            kind: ChatType::Auto,
            chat_template: None,
            pretrained: None,
            field_messages: None,
            field_role: None,
            field_content: None,
            field_training: "weight".into(),
            roles: vec![
                role("user", &["user", "human"]),
                role("assistant", &["assistant", "gpt"]),
                role("system", &["system", "developer"]),
                role("tool", &["tool"]),
            ],
            roles_to_train: vec!["assistant".into()],
            train_on_inputs: false,
            train_on_eos: TrainOnEos::Turn,
            excess_length: ExcessLength::Raise,
            untrained: Untrained::Raise,
        }
    }
}

impl ChatOptions {
    /// Returns the fields of a record that are used.
    pub(super) fn fields(&self) -> Vec<&str> {
        let known =
            "messages conversations prompt completion chosen rejected instruction input output history system tools";
        known.split(' ').chain(self.field_messages.as_deref()).collect()
    }

    /// Returns the role that the files call `name`.
    pub(super) fn role(&self, name: &str) -> Option<&str> {
        let found = self.roles.iter().find(|(role, names)| role == name || names.iter().any(|other| other == name));
        found.map(|(role, _)| role.as_str())
    }

    /// Returns whether messages of this role are trained.
    pub(super) fn trains(&self, role: &str) -> bool {
        self.roles_to_train.iter().any(|name| self.role(name) == Some(role))
    }
}
