//! `--evaluate`: evaluates a model without training it. Writes no files.

use std::path::{Path, PathBuf};

use zero_engine::format::{counted, grouped};
use zero_engine::{DataError, Engine, Error};

use crate::process::signals::Requests;
use crate::train::corpus::{Corpus, Extent};
use crate::train::evaluation;
use crate::train::metrics::Metric;
use crate::train::options::{Finished, Resume, RunOptions};
use crate::train::output::progress::{Output, Progress};
use crate::train::reference;
use crate::train::task::Summary;

/// Evaluates the engine's weights, which come from the checkpoint `from` or are initial weights. Uses all evaluation
/// samples unless `training.eval_batches` is set. A collective.
///
/// # Errors
/// Fails without evaluation data, and if `--resume auto` found no checkpoint. Fails with [`DataError::Stopped`] if a
/// signal has arrived. A later signal ends the process, because an evaluation has nothing to save.
pub(crate) fn run(
    mut engine: Engine,
    mut corpus: Corpus,
    metrics: &[Metric],
    from: Option<PathBuf>,
    options: &RunOptions,
    out: &Path,
    requests: &Requests,
) -> Result<Summary, Error> {
    let Some(eval) = &corpus.eval else {
        let help = "set `data.eval` or `data.eval_fraction`; in your own program, pass the data to `Trainer::data`";
        return Err(Error::setting("--evaluate", "the run has no evaluation data", help));
    };
    if from.is_none() && options.resume == Some(Resume::Auto) {
        let message = format!("{} has no checkpoint to evaluate", out.display());
        return Err(Error::setting("--resume", message, "give a checkpoint folder or a run folder"));
    }
    requests.end_at_once();
    if requests.stop() != 0 {
        return Err(Error::Data(DataError::Stopped));
    }
    let output = if engine.communicator().rank() == 0 { options.output } else { Output::Quiet };
    let output = if output == Output::Auto { Output::Plain } else { output };
    let progress = Progress::new(output.at(engine.config().log_level), 0, 0, 0);
    progress.say(&format!(
        "model: {}, {} parameters   data: {}",
        counted(engine.model().layers().len(), "layer", "layers"),
        grouped(engine.model().elements() as u64),
        counted(eval.len(), "evaluation sample", "evaluation samples"),
    ));
    progress.say(&format!("weights: {}", weights(&engine, from.as_deref())));
    if !engine.config().origins.is_written("training.eval_batches") {
        corpus.extent = Extent::All;
    }
    reference::prepare(&mut engine, &corpus, out, (from.as_deref(), false), &progress)?;
    let evaluation = evaluation::evaluate(&mut engine, &corpus, metrics)?;
    if let Some(evaluation) = &evaluation {
        let is_of_tokens = corpus.vocabulary.is_some() && engine.config().preference.is_none();
        let perplexity =
            if is_of_tokens { format!("  perplexity {:.4}", evaluation.loss.exp()) } else { String::new() };
        let samples = counted(evaluation.samples, "sample", "samples");
        progress.say(&format!("{evaluation}{perplexity}  {samples}"));
    }
    engine.communicator().barrier().wait()?;
    let (finished, steps, folder) = (Finished::Done, engine.steps(), out.into());
    Ok(Summary { evaluation, resumed_from: from, ..Summary::untrained(finished, steps, folder) })
}

/// Describes where the evaluated weights come from.
fn weights(engine: &Engine, from: Option<&Path>) -> String {
    let config = engine.config();
    let adapter = config.adapter.as_ref().and_then(|adapter| adapter.pretrained.as_ref());
    match (from, config.model.as_ref().and_then(|model| model.pretrained()), adapter) {
        (Some(from), ..) => format!("{}, step {}", from.display(), engine.steps()),
        (None, Some(folder), None) => format!("pretrained {folder}"),
        (None, Some(folder), Some(adapter)) => format!("pretrained {folder} with the adapter {adapter}"),
        (None, None, _) if config.training.initial_weights.is_some() => "`training.initial_weights`".into(),
        (None, None, _) => "initial values of an untrained model, because `--resume` is not given".into(),
    }
}
