//! Enums whose variants are spelled as words in `ds.yaml`. Each spelling is declared with its variant; the schema,
//! the reader and the writer all use this declaration.

use serde::Serializer;

use crate::schema::Kind;

/// Declares an enum with the spelling of each variant. Alternative spellings after `|` are read but never written.
/// `enum zero_pipeline::Schedule {…}` declares the spellings of another crate's enum; fields of that type serialise
/// with [`word`].
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

        $crate::choice::choice! { enum $name { $( $variant = $spelling $(| $alias)* , )+ } }

        impl $name {
            /// Returns the spelling in `ds.yaml`.
            pub fn as_str(self) -> &'static str { $crate::choice::Choice::spelling(self) }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str(self.as_str()) }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $crate::choice::word(self, serializer)
            }
        }
    };
    (
        enum $name:path {
            $( $variant:ident = $spelling:literal $(| $alias:literal)* , )+
        }
    ) => {
        impl $crate::choice::Choice for $name {
            const NAMES: &'static [&'static str] = &[$( $spelling $(, $alias)* ,)+];

            fn from_name(name: &str) -> Option<Self> {
                match name {
                    $( $spelling $(| $alias)* => Some(Self::$variant), )+
                    _ => None,
                }
            }

            fn spelling(self) -> &'static str {
                match self { $( Self::$variant => $spelling, )+ }
            }
        }

        $crate::read::reader::read_as! {
            $name: $crate::value::Leaf::Text(text) => $crate::choice::Choice::from_name(&text)?,
                else [$(Self::$variant),+][0];
        }
    };
}

pub(crate) use choice;

/// The trait that [`choice!`] implements. The schema and the reader use it.
pub(crate) trait Choice: Copy {
    /// All spellings, including the alternative ones.
    const NAMES: &'static [&'static str];

    /// The type of a key that takes any of these spellings.
    const KIND: Kind = Kind::Choice { names: Self::NAMES, later: &[] };

    /// Returns the variant with the given spelling.
    fn from_name(name: &str) -> Option<Self>;

    /// Returns the primary spelling, which is the only one written to files.
    fn spelling(self) -> &'static str;
}

/// Serialises the variant as its spelling.
pub(crate) fn word<T: Choice, S: Serializer>(choice: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(choice.spelling())
}
