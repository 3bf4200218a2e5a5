//! `mup`: the base model of the maximal update parametrization (µP).

use serde::Serialize;
use serde_json::json;

use crate::config::{Gpt2, Llama, Model};
use crate::path::last;
use crate::schema::*;
use crate::table::section;

section! {
    /// `mup`. A file sets exactly one of the two keys.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Mup(keys) in "mup" {
        pub base: Option<BaseWidths> = section(&BaseWidths::SECTION, "Widths of the base model: keys of `model` with other values");
        pub base_shapes: Option<String> = key(Kind::Path, "null", "File written by `mup.make_base_shapes`, for a model that the program builds: YAML with one list per parameter, which holds its sizes in the base model, and null for a dimension that is not a width");
    }
}

section! {
    /// `mup.base`: widths of the base model, under the same names as in `model`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct BaseWidths(keys) in "mup.base" {
        pub n_embd: Option<usize> = key(WIDTH, "= model.n_embd", "GPT-2: width of the residual stream");
        pub n_inner: Option<usize> = key(WIDTH, "= in proportion to n_embd", "GPT-2: width inside the feed-forward network");
        pub n_head: Option<usize> = key(WIDTH, "= model.n_head", "GPT-2: attention heads");
        pub hidden_size: Option<usize> = key(WIDTH, "= model.hidden_size", "Llama: width of the residual stream");
        pub intermediate_size: Option<usize> = key(WIDTH, "= in proportion to hidden_size", "Llama: width inside the feed-forward network");
        pub num_attention_heads: Option<usize> = key(WIDTH, "= model.num_attention_heads", "Llama: attention heads");
        pub num_key_value_heads: Option<usize> = key(WIDTH, "= in proportion to num_attention_heads", "Llama: key-value heads");
        pub head_dim: Option<usize> = key(WIDTH, "= hidden_size / num_attention_heads if the same holds in model, else model.head_dim", "Llama: width of a head");
        pub hidden_sizes: Option<Vec<usize>> = key(Kind::Ints { min: 1, max: 1 << 20 }, "= model.hidden_sizes", "MLP: widths of the hidden layers");
    }
}

const WIDTH: Kind = Kind::Int { min: 1, max: 1 << 20 };

/// An error: the path of the key, a message, and advice.
pub(crate) type Mistake = (String, String, String);

impl BaseWidths {
    /// Returns the base model of `model`.
    pub(crate) fn base_of(&self, model: &Model) -> Result<Model, Mistake> {
        let own: &[&str] = match model {
            Model::Gpt2(_) => &[Self::n_embd, Self::n_inner, Self::n_head],
            Model::Llama(_) => &[
                Self::hidden_size,
                Self::intermediate_size,
                Self::num_attention_heads,
                Self::num_key_value_heads,
                Self::head_dim,
            ],
            Model::Mlp(_) => &[Self::hidden_sizes],
        };
        let own: Vec<&str> = own.iter().map(|path| last(path)).collect();
        let keys = json!(self);
        let mut written = keys.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        if let Some((key, _)) = written.find(|(key, _)| !own.contains(&key.as_str())) {
            let help = format!("its widths are {}", own.join(", "));
            return Err((format!("{}.{key}", Mup::base), format!("`model` has no width `{key}`"), help));
        }
        let mut base = model.clone();
        match &mut base {
            Model::Gpt2(gpt2) => self.set_gpt2(gpt2)?,
            Model::Llama(llama) => self.set_llama(llama)?,
            Model::Mlp(mlp) => {
                let layers = mlp.hidden_sizes.len();
                mlp.hidden_sizes = self.hidden_sizes.clone().unwrap_or_else(|| mlp.hidden_sizes.clone());
                if mlp.hidden_sizes.len() != layers {
                    let message = format!(
                        "the base model has {} hidden layers, but `model` has {layers}",
                        mlp.hidden_sizes.len()
                    );
                    return Err((Self::hidden_sizes.to_string(), message, "only widths may differ".to_string()));
                }
            }
        }
        Ok(base)
    }

    fn set_gpt2(&self, model: &mut Gpt2) -> Result<(), Mistake> {
        let before = model.n_embd;
        model.n_embd = self.n_embd.unwrap_or(before);
        model.n_head = self.n_head.unwrap_or(model.n_head);
        model.n_inner = in_proportion((Self::n_inner, self.n_inner, model.n_inner), model.n_embd, before)?;
        divides((Self::n_head, model.n_head), (Self::n_embd, model.n_embd))
    }

    fn set_llama(&self, model: &mut Llama) -> Result<(), Mistake> {
        let (before, heads) = (model.hidden_size, model.num_attention_heads);
        model.hidden_size = self.hidden_size.unwrap_or(before);
        model.num_attention_heads = self.num_attention_heads.unwrap_or(heads);
        let inner = (Self::intermediate_size, self.intermediate_size, model.intermediate_size);
        model.intermediate_size = in_proportion(inner, model.hidden_size, before)?;
        let kv_heads = (Self::num_key_value_heads, self.num_key_value_heads, model.num_key_value_heads);
        model.num_key_value_heads = in_proportion(kv_heads, model.num_attention_heads, heads)?;
        let has_usual_heads = model.head_dim * heads == before;
        match self.head_dim {
            Some(head_dim) => model.head_dim = head_dim,
            None if has_usual_heads => {
                let size = (Self::hidden_size, model.hidden_size);
                divides((Self::num_attention_heads, model.num_attention_heads), size)?;
                model.head_dim = model.hidden_size / model.num_attention_heads;
            }
            None => {}
        }
        divides(
            (Self::num_key_value_heads, model.num_key_value_heads),
            (Self::num_attention_heads, model.num_attention_heads),
        )
    }
}

/// Returns the width that the configuration sets. Otherwise scales the model's width by `base` / `whole`, where `whole`
/// is another width of the model and `base` is its value in the base model.
fn in_proportion(
    (path, written, of_model): (&'static str, Option<usize>, usize),
    base: usize,
    whole: usize,
) -> Result<usize, Mistake> {
    match written {
        Some(written) => Ok(written),
        None if (of_model * base).is_multiple_of(whole) => Ok(of_model * base / whole),
        None => {
            let message = format!("the default, {of_model} · {base} / {whole}, is not an integer");
            Err((path.to_string(), message, format!("set `{}`", last(path))))
        }
    }
}

fn divides((path, part): (&'static str, usize), (other, whole): (&'static str, usize)) -> Result<(), Mistake> {
    match whole.is_multiple_of(part) {
        true => Ok(()),
        false => {
            let message = format!("{} {part} does not divide {} {whole} in the base model", last(path), last(other));
            Err((path.to_string(), message, format!("use a divisor of {whole}")))
        }
    }
}
