//! Decoding: runs a model forward on the next tokens of sequences whose keys and values are cached.

use candle_core::{Result, Tensor, bail};
use zero_ops::{Cache, Pass, decode};

use crate::activations::Activations;
use crate::model::Model;

impl Model {
    /// Runs all layers on `tokens`, `[batch, time]` of u32: row i continues the sequence of the i-th cache. Returns the
    /// logits after each row's last token, `[batch, vocabulary]`.
    ///
    /// The results are bit-identical to a forward pass over the whole sequences, as long as layers mix positions only
    /// with the operations of this project. All parameters must be filled.
    ///
    /// # Errors
    /// Fails if the model takes named inputs, if its output is not a single tensor `[batch, time, vocabulary]`, or if a
    /// layer fails. The caches cannot be used after an error.
    pub fn next_logits(&self, tokens: &Tensor, caches: &mut [&mut Cache]) -> Result<Tensor> {
        if let Some((input, layer)) = self.signature().inputs.first() {
            bail!("layer `{layer}` takes the input `{input}`, so the model cannot compute logits from tokens alone");
        }
        let (batch, time) = tokens.dims2()?;
        decode(caches, || {
            let mut x = Activations::from(tokens.clone());
            for (index, layer) in self.layers().iter().enumerate() {
                let pass = Pass { training: false, seed: 0, step: 0, sample: 0, layer: index as u32 };
                if index + 1 == self.layers().len() && self.ends_by_position() {
                    x = Activations::from(last(x.single()?)?);
                }
                x = layer.pass_on(layer.run(&x, &pass)?, &x)?;
            }
            let logits = x.single()?;
            match logits.dims() {
                &[rows, times, vocabulary] if rows == batch && (times == time || times == 1) => {
                    last(logits)?.reshape((batch, vocabulary))
                }
                dims => bail!("the model's outputs are {dims:?}, not logits of [{batch}, {time}, vocabulary]"),
            }
        })
    }
}

/// Returns the last position of `[batch, time, width]`.
fn last(x: &Tensor) -> Result<Tensor> {
    let (_, time, _) = x.dims3()?;
    x.narrow(1, time - 1, 1)?.contiguous()
}
