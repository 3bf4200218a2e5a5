//! [`Builder`]: a configuration written in a program instead of a file.

use serde::Serialize;

use crate::Source;
use crate::config::{ADAMW, AdamParams, Bf16, Config, Optimizer, Pipeline, Training, Zero};
use crate::errors::{ErrorKind, Errors};
use crate::read::node::{At, Node, Value};
use crate::read::overrides;
use crate::report::Report;
use crate::typed::Typed;

/// A configuration that a program writes key by key. [`build`](Self::build) checks and resolves it like a file.
///
/// The common keys have methods; [`set`](Self::set) sets any other key. If a key is set twice, the later value wins.
///
/// ```
/// use zero_config::{Config, ZeroStage};
///
/// let config = Config::builder()
///     .zero_stage(3)
///     .micro_batch(4)
///     .adamw(3e-4)
///     .set("zero_optimization.overlap_comm", true)
///     .set("scheduler", serde_json::json!({"type": "WarmupLR", "params": {"warmup_num_steps": 100}}))
///     .build()?;
/// assert_eq!((config.zero.stage, config.optimizer.lr()), (ZeroStage::Three, 3e-4));
///
/// let errors = Config::builder().micro_batch(4).set("zero_optimization.stagee", 3).build().unwrap_err();
/// assert_eq!(
///     errors.to_string(),
///     "error: unknown key `zero_optimization.stagee`\n  \
///        in: zero_optimization.stagee (set by the program)\n  \
///        help: did you mean `stage`?"
/// );
/// # Ok::<(), zero_config::Errors>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct Builder {
    root: Node,
    report: Report,
}

/// Declares the methods that set one key.
macro_rules! setters {
    ($( $(#[$doc:meta])* $name:ident($value:ident: $type:ty) sets $path:expr; )+) => {
        impl Builder {
            $( $(#[$doc])* pub fn $name(self, $value: $type) -> Self { self.set($path, $value) } )+
        }
    };
}

setters! {
    /// Sets the ZeRO stage, from 0 to 3.
    zero_stage(stage: u8) sets Zero::stage;
    /// Sets the number of samples per forward and backward pass on one rank.
    micro_batch(samples: usize) sets Config::train_micro_batch_size_per_gpu;
    /// Sets the number of samples per optimizer step over all ranks.
    train_batch(samples: usize) sets Config::train_batch_size;
    /// Sets the number of micro-batches per optimizer step.
    gradient_accumulation(steps: usize) sets Config::gradient_accumulation_steps;
    /// Sets the maximum global L2 norm of the gradient; 0 disables clipping.
    gradient_clipping(norm: f64) sets Config::gradient_clipping;
    /// Sets whether parameters and activations are bfloat16.
    bf16(enabled: bool) sets Bf16::enabled;
    /// Sets the number of pipeline stages.
    pipeline_stages(stages: usize) sets Pipeline::stages;
    /// Sets the number of optimizer steps to train.
    max_steps(steps: usize) sets Training::max_steps;
    /// Sets the number of passes over the data (epochs).
    epochs(epochs: f64) sets Training::epochs;
    /// Sets the seed of initialisation, shuffling and dropout.
    seed(seed: u64) sets Training::seed;
    /// Sets the number of steps between evaluations; 0 never evaluates.
    eval_every(steps: usize) sets Training::eval_every;
    /// Sets the number of steps between checkpoints; 0 saves none during training.
    save_every(steps: usize) sets Training::save_every;
    /// Sets the folder of the run.
    output_dir(folder: &str) sets Training::output_dir;
}

impl Config {
    /// Starts a configuration without any keys.
    pub fn builder() -> Builder {
        let report = Report::new(Source { name: "<program>".to_string(), text: String::new() }, &[]);
        Builder { root: Node { value: Value::Map(Vec::new()), at: At::Default }, report }
    }
}

impl Builder {
    /// Sets the optimizer to AdamW with this learning rate and the default values of its other parameters.
    pub fn adamw(self, lr: f64) -> Self {
        self.set(Optimizer::TYPE, ADAMW).set(AdamParams::lr, lr)
    }

    /// Sets the key at `path` (`zero_optimization.stage`). `value` may be anything that serialises to a value of the
    /// file: a number, a string, a list, `serde_json::json!({…})` for a section, or a field of another configuration.
    pub fn set(mut self, path: &str, value: impl Serialize) -> Self {
        let (message, help) = match (overrides::keys(path), serde_json::to_value(value)) {
            (None, _) => (
                format!("`{path}` is not the path of a key"),
                Some("separate keys with dots, as in `zero_optimization.stage`"),
            ),
            (Some(_), Err(error)) => (format!("`{path}`: the value cannot be written as YAML: {error}"), None),
            // JSON has no NaN and no infinities.
            (Some(_), Ok(serde_json::Value::Null)) => {
                (format!("`{path}`: expected a value, found null, NaN or an infinite number"), None)
            }
            (Some(path), Ok(json)) => {
                overrides::set(&mut self.root, &path, Node::of_json(&json, At::Program));
                return self;
            }
        };
        self.report.error(ErrorKind::Value, path, At::Program, message, help.map(String::from));
        self
    }

    /// Checks the configuration and resolves it for `launcher.num_processes` ranks. An engine or a trainer resolves
    /// it again for the actual number of ranks.
    ///
    /// # Errors
    /// All errors of the configuration, as for a file.
    pub fn build(self) -> Result<Config, Errors> {
        Typed::of_tree(self.root, self.report)?.resolve(None)
    }
}
