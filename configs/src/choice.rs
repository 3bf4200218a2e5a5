//! Enums whose variants are spelled as words in `ds.yaml`. Each spelling is declared with its variant; the schema,
//! the reader and the writer all use this declaration.

use crate::schema::Kind;

/// Declares an enum with the spelling of each variant. Alternative spellings after `|` are read but never written.
macro_rules! choice {
    (
        $(#[$meta:meta])*
        pub enum $name:ident {
            $( $(#[$variant_meta:meta])* $variant:ident = $spelling:literal $(| $alias:literal)* , )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $( $(#[$variant_meta])* $variant, )+ }

        impl $name {
            /// Returns the spelling in `ds.yaml`.
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$variant => $spelling, )+ }
            }
        }

        impl $crate::choice::Choice for $name {
            const NAMES: &'static [&'static str] = &[$( $spelling $(, $alias)* ,)+];

            fn from_name(name: &str) -> Option<Self> {
                match name {
                    $( $spelling $(| $alias)* => Some(Self::$variant), )+
                    _ => None,
                }
            }
        }

        $crate::reader::read_as! {
            $name: $crate::value::Leaf::Text(text) => $crate::choice::Choice::from_name(&text)?,
                else [$(Self::$variant),+][0];
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str(self.as_str()) }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }
    };
}

pub(crate) use choice;

/// Implemented by [`choice!`] for the schema and the reader.
pub(crate) trait Choice: Sized {
    /// All spellings, including the alternative ones.
    const NAMES: &'static [&'static str];

    /// The type of a key that takes any of them.
    const KIND: Kind = Kind::Choice { names: Self::NAMES, later: &[] };

    /// Returns the variant with the given spelling.
    fn from_name(name: &str) -> Option<Self>;
}
