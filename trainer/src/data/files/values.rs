//! Converts values of Arrow arrays to JSON. Records of all formats have JSON values.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use arrow_select::take::take;
use serde_json::{Map, Value};

/// Returns the value of a row. Omits null fields of structs, because a table cannot distinguish them from fields that a
/// record does not have.
///
/// # Errors
/// Fails if the type of the value, or of a value inside it, has no counterpart in JSON. The message names the type.
pub(super) fn value(array: &dyn Array, row: usize) -> Result<Value, String> {
    if array.is_null(row) {
        return Ok(Value::Null);
    }
    let list = |items: ArrayRef| (0..items.len()).map(|i| value(&items, i)).collect::<Result<_, _>>().map(Value::Array);
    Ok(match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => array.as_boolean().value(row).into(),
        DataType::Int8 => array.as_primitive::<Int8Type>().value(row).into(),
        DataType::Int16 => array.as_primitive::<Int16Type>().value(row).into(),
        DataType::Int32 => array.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => array.as_primitive::<Int64Type>().value(row).into(),
        DataType::UInt8 => array.as_primitive::<UInt8Type>().value(row).into(),
        DataType::UInt16 => array.as_primitive::<UInt16Type>().value(row).into(),
        DataType::UInt32 => array.as_primitive::<UInt32Type>().value(row).into(),
        DataType::UInt64 => array.as_primitive::<UInt64Type>().value(row).into(),
        DataType::Float16 => array.as_primitive::<Float16Type>().value(row).to_f64().into(),
        DataType::Float32 => array.as_primitive::<Float32Type>().value(row).into(),
        DataType::Float64 => array.as_primitive::<Float64Type>().value(row).into(),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => text(array, row).map_or(Value::Null, Value::from),
        DataType::List(_) => list(array.as_list::<i32>().value(row))?,
        DataType::LargeList(_) => list(array.as_list::<i64>().value(row))?,
        DataType::ListView(_) => list(array.as_list_view::<i32>().value(row))?,
        DataType::LargeListView(_) => list(array.as_list_view::<i64>().value(row))?,
        DataType::FixedSizeList(..) => list(array.as_fixed_size_list().value(row))?,
        DataType::Struct(fields) => {
            let columns = fields.iter().map(|field| field.name().as_str()).zip(array.as_struct().columns());
            Value::Object(object(columns, row).map_err(|(field, message)| format!("field `{field}`: {message}"))?)
        }
        DataType::Map(..) => {
            let entries = array.as_map().value(row);
            let [keys, values] = [0, 1].map(|i| entries.column(i));
            let entry = |i| match value(keys, i)? {
                Value::String(key) => Ok((key, value(values, i)?)),
                key => Err(format!("the map key {key} is not a string")),
            };
            Value::Object((0..entries.len()).map(entry).collect::<Result<_, _>>()?)
        }
        DataType::Dictionary(..) => value(&plain(&array.slice(row, 1))?, 0)?,
        other => return Err(format!("the type {other} has no counterpart in JSON")),
    })
}

/// Returns a value of a table of numbers as text. Floating-point numbers do not pass through JSON, which lacks NaN and
/// infinity. A boolean becomes the class 0 or 1.
pub(super) fn field(array: &dyn Array, row: usize) -> Result<String, String> {
    let text = |value: Value| match value {
        Value::Bool(class) => u8::from(class).to_string(),
        value => value.to_string(),
    };
    match array.data_type() {
        _ if array.is_null(row) => Ok("null".into()),
        DataType::Float16 => Ok(format!("{:?}", array.as_primitive::<Float16Type>().value(row).to_f32())),
        DataType::Float32 => Ok(format!("{:?}", array.as_primitive::<Float32Type>().value(row))),
        DataType::Float64 => Ok(format!("{:?}", array.as_primitive::<Float64Type>().value(row))),
        DataType::Dictionary(..) => field(&plain(&array.slice(row, 1))?, 0),
        _ => value(array, row).map(text),
    }
}

/// Returns the values of a row as an object, without nulls. The error names the column.
pub(super) fn object<'a>(
    columns: impl Iterator<Item = (&'a str, &'a ArrayRef)>,
    row: usize,
) -> Result<Map<String, Value>, (&'a str, String)> {
    let mut object = Map::new();
    for (name, column) in columns {
        match value(column, row).map_err(|message| (name, message))? {
            Value::Null => {}
            value => drop(object.insert(name.to_string(), value)),
        }
    }
    Ok(object)
}

/// Replaces the keys of a dictionary array by their values. Returns other arrays unchanged.
pub(super) fn plain(array: &ArrayRef) -> Result<ArrayRef, String> {
    match array.as_any_dictionary_opt() {
        Some(dictionary) => take(dictionary.values(), dictionary.keys(), None).map_err(|error| error.to_string()),
        None => Ok(array.clone()),
    }
}

/// Returns the text of a row, or `None` if it is null or not a text.
pub(super) fn text(array: &dyn Array, row: usize) -> Option<&str> {
    let is_valid = !array.is_null(row);
    is_valid.then_some(array.data_type()).and_then(|kind| match kind {
        DataType::Utf8 => Some(array.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => Some(array.as_string::<i64>().value(row)),
        DataType::Utf8View => Some(array.as_string_view().value(row)),
        _ => None,
    })
}

/// Returns whether the values are texts.
pub(super) fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, values) => is_text(values),
        kind => kind.is_string(),
    }
}
