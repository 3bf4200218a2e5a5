//! Options for conversations as training data.

use std::path::PathBuf;

use zero_config::{ChatType, ExcessLength, TrainOnEos, Untrained};

/// How conversations become samples. The fields correspond to the keys of `data.chat`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatOptions {
    /// The layout of the records.
    pub kind: ChatType,
    /// A Jinja template, or the path of its file. `None` uses the template in the tokenizer's folder, or in
    /// `pretrained`.
    pub chat_template: Option<String>,
    /// A second folder in which to look for a template, after the tokenizer's folder.
    pub pretrained: Option<PathBuf>,
    /// Field of a record that holds the messages; `None` means `messages`, or else `conversations`.
    pub field_messages: Option<String>,
    /// Field of a message that holds its role; `None` means `role`, or else `from`.
    pub field_role: Option<String>,
    /// Field of a message that holds its text; `None` means `content`, or else `value`.
    pub field_content: Option<String>,
    /// Field of a message that decides whether the message is trained on. It overrides the role.
    pub field_training: String,
    /// The roles that templates know, each with its names in the files.
    pub roles: Vec<(String, Vec<String>)>,
    /// Roles whose messages are trained on. A role may be given by any of its names.
    pub roles_to_train: Vec<String>,
    /// Whether to train on every token.
    pub train_on_inputs: bool,
    /// Which end-of-turn tokens are trained on.
    pub train_on_eos: TrainOnEos,
    /// What to do with a conversation of more than `sequence_length + 1` tokens.
    pub excess_length: ExcessLength,
    /// What to do with a conversation that has no tokens to train on.
    pub untrained: Untrained,
}

impl Default for ChatOptions {
    /// Returns the defaults: the model's own template is used, and assistant messages are trained.
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
    /// Returns the names of the record fields that are read.
    pub(super) fn fields(&self) -> Vec<&str> {
        let known =
            "messages conversations prompt completion chosen rejected instruction input output history system tools";
        known.split(' ').chain(self.field_messages.as_deref()).collect()
    }

    /// Returns the role that has the name `name` in the files.
    pub(super) fn role(&self, name: &str) -> Option<&str> {
        let found = self.roles.iter().find(|(role, names)| role == name || names.iter().any(|other| other == name));
        found.map(|(role, _)| role.as_str())
    }

    /// Returns whether messages of this role are trained.
    pub(super) fn trains(&self, role: &str) -> bool {
        self.roles_to_train.iter().any(|name| self.role(name) == Some(role))
    }
}
