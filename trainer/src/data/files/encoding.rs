//! Encodings of the columns of MDS shards.

use half::f16;
use serde_json::Value;

use crate::data::options::TokenDtype;

/// The encoding of a column's values.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Encoding {
    Text,
    Bytes,
    Json,
    /// Decimal digits.
    Digits,
    Number(Number),
    /// Consecutive numbers.
    List(Number),
    /// An array. If `number` or `shape` is `None`, each value begins with its own type or shape.
    Array {
        number: Option<Number>,
        shape: Option<Vec<u64>>,
    },
    /// An encoding that is not decoded, such as an image.
    Other(String),
}

/// The type of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Number {
    U8,
    I8,
    U16,
    I16,
    F16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

/// The names of NumPy's types, and their codes in encoded arrays.
const NUMBERS: [(&str, u8, Number); 11] = [
    ("uint8", 8, Number::U8),
    ("int8", 9, Number::I8),
    ("uint16", 16, Number::U16),
    ("int16", 17, Number::I16),
    ("float16", 18, Number::F16),
    ("uint32", 32, Number::U32),
    ("int32", 33, Number::I32),
    ("float32", 34, Number::F32),
    ("uint64", 64, Number::U64),
    ("int64", 65, Number::I64),
    ("float64", 66, Number::F64),
];

impl Number {
    /// Returns the numbers in `bytes`, or `None` if the last number is incomplete.
    pub(super) fn read(self, bytes: &[u8]) -> Option<Vec<Value>> {
        fn all<const N: usize, T: Into<Value>>(bytes: &[u8], read: fn([u8; N]) -> T) -> Option<Vec<Value>> {
            let (values, rest) = bytes.as_chunks();
            rest.is_empty().then(|| values.iter().map(|&value| read(value).into()).collect())
        }
        match self {
            Self::U8 => all(bytes, u8::from_le_bytes),
            Self::I8 => all(bytes, i8::from_le_bytes),
            Self::U16 => all(bytes, u16::from_le_bytes),
            Self::I16 => all(bytes, i16::from_le_bytes),
            Self::F16 => all(bytes, |value| f16::from_le_bytes(value).to_f64()),
            Self::U32 => all(bytes, u32::from_le_bytes),
            Self::I32 => all(bytes, i32::from_le_bytes),
            Self::F32 => all(bytes, f32::from_le_bytes),
            Self::U64 => all(bytes, u64::from_le_bytes),
            Self::I64 => all(bytes, i64::from_le_bytes),
            Self::F64 => all(bytes, f64::from_le_bytes),
        }
    }
}

impl Encoding {
    /// Parses the name of an encoding in `index.json`.
    pub(super) fn parse(name: &str) -> Self {
        let number = |name: &str| NUMBERS.iter().find(|(known, ..)| *known == name).map(|&(.., number)| number);
        let (kind, arguments) = name.split_once(':').map_or((name, None), |(kind, rest)| (kind, Some(rest)));
        match (kind, arguments) {
            ("str", None) => Self::Text,
            ("bytes", None) => Self::Bytes,
            ("json", None) => Self::Json,
            ("str_int" | "str_float", None) => Self::Digits,
            ("int", None) => Self::Number(Number::I64),
            ("ndarray", None) => Self::Array { number: None, shape: None },
            ("ndarray", Some(arguments)) => {
                let (kind, shape) =
                    arguments.split_once(':').map_or((arguments, None), |(kind, shape)| (kind, Some(shape)));
                let shape = shape.map(|shape| shape.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>());
                match (number(kind), shape.transpose()) {
                    (Some(number), Ok(shape)) => Self::Array { number: Some(number), shape },
                    _ => Self::Other(name.into()),
                }
            }
            (_, None) => number(kind).map_or_else(|| Self::Other(name.into()), Self::Number),
            _ => Self::Other(name.into()),
        }
    }

    /// Returns the encoding of tokens that are stored as raw bytes.
    pub(super) fn tokens(dtype: TokenDtype) -> Self {
        let number = match dtype {
            TokenDtype::U16 => Number::U16,
            TokenDtype::U32 => Number::U32,
            TokenDtype::I64 => Number::I64,
        };
        Self::List(number)
    }

    /// Returns a value as JSON. An array becomes a flat list of numbers, whatever its shape.
    ///
    /// # Errors
    /// Fails if the bytes are invalid. The message describes the fault.
    pub(super) fn value(&self, bytes: &[u8]) -> Result<Value, String> {
        let text = || std::str::from_utf8(bytes).map_err(|error| format!("is not UTF-8: {error}"));
        match self {
            Self::Text => Ok(text()?.into()),
            Self::Json | Self::Digits => serde_json::from_slice(bytes).map_err(|error| format!("is not JSON: {error}")),
            Self::Number(number) => match number.read(bytes).as_deref() {
                Some([value]) => Ok(value.clone()),
                _ => Err("is not a single number".into()),
            },
            Self::List(number) => number.read(bytes).map(Value::Array).ok_or_else(|| "ends within a number".into()),
            Self::Array { number, shape } => {
                array(*number, shape.as_deref(), bytes).map(Value::Array).ok_or_else(|| "is a malformed array".into())
            }
            Self::Bytes => Err("is bytes, which have no counterpart in JSON".into()),
            Self::Other(name) => Err(format!("has the encoding `{name}`, which is unsupported")),
        }
    }
}

/// Returns the numbers of an array. If `number` is `None`, the bytes begin with the type of the numbers. If `shape` is
/// `None`, the next bytes hold the number of dimensions, the width of the sizes, and the sizes.
fn array(number: Option<Number>, shape: Option<&[u64]>, mut bytes: &[u8]) -> Option<Vec<Value>> {
    let number = match number {
        Some(number) => number,
        None => {
            let code = *bytes.split_off_first()?;
            NUMBERS.iter().find(|(_, known, _)| *known == code)?.2
        }
    };
    let size = |sizes: &[u64]| sizes.iter().try_fold(1u64, |all, &size| all.checked_mul(size));
    let size = match shape {
        Some(shape) => size(shape)?,
        None => {
            let byte = *bytes.split_off_first()?;
            let (dimensions, width) =
                (usize::from(byte >> 2), [Number::U8, Number::U16, Number::U32, Number::U64][usize::from(byte & 3)]);
            let sizes = width.read(bytes.split_off(..dimensions << (byte & 3))?)?;
            size(&sizes.iter().filter_map(Value::as_u64).collect::<Vec<_>>())?
        }
    };
    number.read(bytes).filter(|values| values.len() as u64 == size)
}
