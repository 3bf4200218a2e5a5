//! The head of a language model that is trained on pairs of a chosen and a rejected answer.

use crate::activations::Activations;
use crate::layer::Layer;
use crate::layers::Layers;
use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use zero_ops::graph::fused_block;
use zero_ops::{Pass, PreferenceLoss, VocabParallel, preference_loss, sum_of_slices};

use super::{LanguageHead, POSITION_IDS};

/// Name of the batch's input `[batch, time]` of i64. It holds, for each position, the next token if that token belongs
/// to an answer or its prompt, otherwise [`IGNORE_INDEX`](zero_ops::IGNORE_INDEX).
pub const LABELS: &str = "labels";

/// Name of the batch's input `[batch, time]` of u8: 0 for labels of the chosen answer, 1 for labels of the rejected
/// answer, 2 for labels of the prompt before the chosen answer.
pub const LABEL_GROUPS: &str = "label_groups";

/// Name of the batch's target `[batch, 3]` of f32: the number of labels of each group.
pub const LABEL_COUNTS: &str = "label_counts";

/// Name of the batch's target `[batch, 2]` of f32: the log-probabilities of the chosen and the rejected answer under
/// the reference model. Losses without a reference ignore it.
pub const REFERENCE_LOG_PROBS: &str = "reference_log_probs";

/// Appends the last layer, `lm_head`: with a `loss` for pairs it returns sums of log-probabilities `[batch, 3]`,
/// otherwise logits.
pub(super) fn with_head(
    layers: Layers,
    (width, vocabulary, std): (usize, usize, f64),
    loss: Option<PreferenceLoss>,
) -> Layers {
    let Some(loss) = loss else {
        let layers = layers.head("lm_head", move |vb| LanguageHead::new(width, vocabulary, std, vb));
        return layers.shares_sequences([POSITION_IDS]).tensor_parallel();
    };
    layers
        .layer("lm_head", move |vb: VarBuilder| Ok(PairHead { head: VocabParallel::new(width, vocabulary, std, &vb)? }))
        .with([LABELS, LABEL_GROUPS])
        .loss_of(["lm_head"], [REFERENCE_LOG_PROBS, LABEL_COUNTS], move |[log_probs], [reference, counts]| {
            fused_block(log_probs, |log_probs| preference_loss(log_probs, reference, counts, loss))
        })
        .shares_sequences([POSITION_IDS, REFERENCE_LOG_PROBS, LABEL_COUNTS])
        .tensor_parallel()
}

struct PairHead {
    head: VocabParallel,
}

impl Layer for PairHead {
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        let [x, labels, of_group] = x.tensors() else {
            bail!("lm_head: expected an input, {LABELS} and {LABEL_GROUPS}, got {} tensors", x.tensors().len());
        };
        let log_probs = |x: &Tensor, head: &VocabParallel| {
            sum_of_slices(&head.log_probs(x, labels, of_group, PreferenceLoss::SUMS)?)
        };
        match pass.training {
            true => fused_block(x, |x| log_probs(x, &self.head)),
            false => log_probs(&x.detach(), &self.head.detached()),
        }
        .map(Activations::from)
    }

    fn exchanges(&self) -> bool {
        true
    }
}
