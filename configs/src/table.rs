//! [`section!`]: the table of keys. A section is declared once, as a struct. The declaration of a key contains its
//! type, its default, its description on the reference page and, if it is not implemented, the reason. The macro
//! generates the struct, its reader, the schema and a constant with each key's path.

/// Declares a section of the file.
///
/// ```text
/// section! {
///     /// `aio`: how offload reads and writes its files.
///     #[derive(Debug, Clone, PartialEq, Serialize)]
///     pub struct Aio(keys) in "aio" {
///         pub block_size: usize = now(BLOCK, "1048576", "Bytes per read or write");
///         /// Number of threads of a rank, at least 1.
///         pub threads: usize = key(COUNT, "= the cores", "Threads") [else keys.cores()];
///         = rejected("use_gds", "false", "GPUDirect Storage is not implemented");
///     }
/// }
/// ```
///
/// A row is a field and a constructor of [`Key`](crate::schema::Key), or `=` and a constructor alone for a key without
/// a field. The description is the documentation of the field, unless the field has a doc comment. A field whose
/// description is a constant needs a doc comment. `[else …]` gives the value if the key is not written or `auto`; the
/// expression may use the fields above it and the reader `keys`. `[or …]` does the same for an `Option`. `[is …]` gives
/// the value of a field that is not read from the file. `pub zero as "zero_optimization"` declares a field whose name
/// differs from its key.
///
/// The macro generates, for `Aio`: the struct; `Aio::SECTION` for the schema; `Aio::PATH`, and `Aio::block_size`, the
/// path of the key (`aio.block_size`), for checks and messages; `Aio::of(&mut Reader)`; and
/// [`Read`](crate::read::reader::Read) and [`Find`](crate::read::reader::Find).
macro_rules! section {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident($keys:ident) in $section:literal $(, off while $switch:ident is $off:tt)? {
            $(
                $( $(#$field_meta:tt)* pub $field:ident $(as $other:literal)? : $type:ty )?
                = $row:ident $args:tt $(.instead($instead:expr))? $([$($option:tt)*])? ;
            )*
        }
        $( and { $( $(#[$extra_meta:meta])* $extra_vis:vis $extra:ident : $extra_type:ty = $extra_value:expr, )* } )?
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $( $(
                $(#$field_meta)*
                #[doc = $crate::table::section!(@doc [$(#$field_meta)*] $args)]
                $(#[serde(rename = $other)])?
                pub $field: $type,
            )? )*
            $( $( $(#[$extra_meta])* $extra_vis $extra: $extra_type, )* )?
        }

        #[allow(non_upper_case_globals, dead_code)] // The constants have the names of the fields.
        impl $name {
            pub(crate) const SECTION: $crate::schema::Section = $crate::schema::Section {
                keys: &[ $(
                    $crate::table::section!(@row $row [$($field $($other)?)?] $args) $(.instead($instead))?,
                )* ],
                switch: $crate::table::section!(@switch $($switch $off)?),
            };

            pub(crate) const PATH: &'static str = $section;

            $( $(
                pub(crate) const $field: &'static str =
                    $crate::path::path!($section, $crate::table::section!(@name $field $($other)?));
            )? )*

            /// Reads the keys of the section.
            pub(crate) fn of($keys: &mut $crate::read::reader::Reader<'_, '_>) -> Self {
                $( $crate::table::section!(@read $keys [$($field $($other)? : $type)?] $($($option)*)?); )*
                Self { $( $($field,)? )* $( $($extra: $extra_value,)* )? }
            }
        }

        impl $crate::read::reader::Find for $name {
            fn find(keys: &mut $crate::read::reader::Reader<'_, '_>, name: &'static str) -> Option<Self> {
                keys.inner(name).map(|mut keys| Self::of(&mut keys))
            }
        }

        impl $crate::read::reader::Read for $name {
            fn read(keys: &mut $crate::read::reader::Reader<'_, '_>, name: &'static str) -> Self {
                Self::of(&mut keys.section(name))
            }
        }
    };
    (@doc [#[doc = $doc:expr] $($meta:tt)*] $args:tt) => { "" };
    (@doc $meta:tt ($kind:expr, $default:expr, $description:literal)) => { concat!($description, ".") };
    (@doc $meta:tt ($section:expr, $description:literal)) => { concat!($description, ".") };
    (@doc $meta:tt ($description:literal)) => { concat!($description, ".") };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $other:literal) => { $other };
    (@row $row:ident [] ($($args:tt)*)) => { $row($($args)*) };
    (@row $row:ident [$($field:tt)+] ($($args:tt)*)) => { $row($crate::table::section!(@name $($field)+), $($args)*) };
    (@switch) => { $crate::schema::Switch::Keys };
    (@switch $switch:ident $off:tt) => { $crate::schema::Switch::Key(stringify!($switch), &$off) };
    (@read $keys:ident [] ) => {};
    (@read $keys:ident [$field:ident $($other:literal)? : $type:ty]) => {
        let $field: $type = $crate::read::reader::Read::read($keys, $crate::table::section!(@name $field $($other)?));
    };
    (@read $keys:ident [$field:ident : $type:ty] else $otherwise:expr) => {
        let found: Option<$type> = $crate::read::reader::Find::find($keys, stringify!($field));
        let $field: $type = found.unwrap_or_else(|| $otherwise);
    };
    (@read $keys:ident [$field:ident : $type:ty] or $otherwise:expr) => {
        let found: $type = $crate::read::reader::Read::read($keys, stringify!($field));
        let $field: $type = found.or_else(|| $otherwise);
    };
    (@read $keys:ident [$field:ident : $type:ty] is $value:expr) => {
        let $field: $type = $value;
    };
}

pub(crate) use section;
