//! `data.chat`: conversations as training data. Keys that also exist in Axolotl or TRL have the same names as there.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::schema::*;
use crate::table::section;

section! {
    /// `data.chat`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Chat(keys) in "data.chat" {
        pub kind as "type": ChatType = key(ChatType::KIND, "auto", "Record format. auto: detected from the fields of the first record; messages: a list of messages, as in OpenAI's or ShareGPT's format; alpaca: instruction, input and output; prompt_completion: prompt and completion, each a string or a list of messages; preference: chosen and rejected, with their prompt or as whole conversations, for the `preference` section");
        pub chat_template: Option<String> = key(Kind::Text, "= the model's own", "Jinja template: its text or the path of a file. The model's own is chat_template.jinja, or chat_template in tokenizer_config.json, in the tokenizer's folder or in model.pretrained");
        pub field_messages: Option<String> = key(Kind::Text, "= messages, or else conversations", "Field of a record that holds the list of messages");
        pub message_property_mappings: MessageProperties = section(&MessageProperties::SECTION, "Names of the fields of a message");
        pub roles: Roles = section(&Roles::SECTION, "For each role of the template, the names of that role in the files");
        pub message_field_training: String = key(Kind::Text, "weight", "Field of a message (0, 1, true or false) that decides whether its tokens are trained on, regardless of its role");
        pub roles_to_train: Vec<String> = key(Kind::Texts, "[assistant]", "Roles whose messages are trained on");
        pub train_on_inputs: bool = key(Kind::Bool, "false", "Train on every token, including the user's and the template's");
        pub train_on_eos: TrainOnEos = key(TrainOnEos::KIND, "turn", "Which end-of-turn tokens are trained on: turn, those of messages that are trained on; all; last, only the last one");
        pub excess_length_strategy: ExcessLength = key(ExcessLength::KIND, "raise", "What to do with a conversation of more than sequence_length + 1 tokens: raise an error, drop it, or truncate its end");
        pub untrained_strategy: Untrained = key(Untrained::KIND, "raise", "What to do with a conversation that has no token to train on: raise an error or drop it");
        = later("sample_packing", "false", "Several conversations in one sample").instead("set `data.sample_packing: true`");
    }
}

section! {
    /// `data.chat.message_property_mappings`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct MessageProperties(keys) in "data.chat.message_property_mappings" {
        pub role: Option<String> = key(Kind::Text, "= role, or else from", "Field of a message that holds its role");
        pub content: Option<String> = key(Kind::Text, "= content, or else value", "Field of a message that holds its text");
    }
}

section! {
    /// `data.chat.roles`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Roles(keys) in "data.chat.roles" {
        pub user: Vec<String> = key(Kind::Texts, "[user, human]", "Names of the role `user`");
        pub assistant: Vec<String> = key(Kind::Texts, "[assistant, gpt]", "Names of the role `assistant`");
        pub system: Vec<String> = key(Kind::Texts, "[system, developer]", "Names of the role `system`");
        pub tool: Vec<String> = key(Kind::Texts, "[tool]", "Names of the role `tool`");
    }
}

choice! {
    /// The kind of records in a file.
    pub enum ChatType {
        /// Recognized by the fields of the first record.
        Auto = "auto",
        /// A list of messages.
        Messages = "messages",
        /// An instruction, an input and an output.
        Alpaca = "alpaca",
        /// A prompt and its completion.
        PromptCompletion = "prompt_completion",
        /// A chosen and a rejected answer.
        Preference = "preference",
    }
}

choice! {
    /// Which end-of-turn tokens are trained.
    pub enum TrainOnEos {
        /// The end-of-turn tokens of trained messages.
        Turn = "turn",
        /// The end-of-turn tokens of all messages.
        All = "all",
        /// The last end-of-turn token of a conversation.
        Last = "last",
    }
}

choice! {
    /// Reaction to a conversation that is longer than a sample.
    pub enum ExcessLength {
        /// An error.
        Raise = "raise",
        /// Leave the conversation out.
        Drop = "drop",
        /// Keep its beginning.
        Truncate = "truncate",
    }
}

choice! {
    /// Reaction to a conversation without a trained token.
    pub enum Untrained {
        /// An error.
        Raise = "raise",
        /// Leave the conversation out.
        Drop = "drop",
    }
}
