//! Records each step: prints progress, writes a line of `metrics.jsonl`, and passes scalars to the monitors.

use serde_json::{Value, json};

use super::super::evaluation::Evaluation;
use super::super::files::Files;
use super::super::report;
use super::super::report::stragglers::Stragglers;
use super::{Run, Together};
use crate::monitor::metric::{self, Record, Scalar};
use crate::train::output::progress::Shown;
use zero_engine::{Error, Step};

impl Run<'_> {
    /// Shows and logs a step.
    pub(super) fn record(
        &mut self,
        step: &Step,
        together: &Together,
        evaluation: Option<&Evaluation>,
        files: Option<&mut Files>,
    ) -> Result<(), Error> {
        let config = self.engine.config();
        let samples = step.samples as u64;
        let tokens = self.positions as u64;
        let seconds = together.micros as f64 / 1e6;
        let tokens_per_s = tokens as f64 / seconds;
        self.report.step(step, together.peak_bytes);
        let (loss, lr, grad_norm) = (step.loss, step.lr, step.grad_norm);
        self.progress.step(&Shown { step: step.step, loss, lr, grad_norm, tokens_per_s });
        if let (Some(before), Some(after)) = (step.loss_scale, self.engine.loss_scale())
            && !grad_norm.is_finite()
        {
            self.progress.say(&overflow(step.step, before, after));
        }
        let slow = Stragglers::slow(&together.own_ms);
        if let Some(word) = self.stragglers.word(step.step, &together.own_ms, slow) {
            self.progress.say(&word);
        }
        if let Some(evaluation) = evaluation {
            self.progress.say(&format!("step {:>6}  {evaluation}", step.step));
        }
        if config.memory_breakdown
            && self.progress.is_due(step.step)
            && let Some(table) = report::memory_table(&self.engine)?
        {
            self.progress.say(&table);
        }
        if config.wall_clock_breakdown && self.progress.is_due(step.step) {
            self.progress.say(&self.breakdown.line());
        }
        if config.comms_logger.enabled && config.comms_logger.verbose {
            let sizes = self.engine.zero().groups().sizes();
            let lines = self.seen.lines(&sizes, &config.comms_logger);
            lines.iter().for_each(|line| self.progress.say(line));
        }
        let Some(files) = files else { return Ok(()) };
        let mut line = json!({
            "step": step.step, "loss": finite(step.loss), "lr": step.lr, "grad_norm": step.grad_norm,
            "loss_scale": step.loss_scale, "skipped": step.skipped, "samples": samples, "tokens": tokens,
            "step_ms": round(seconds * 1e3), "data_wait_ms": round(together.data_wait_ms),
            "tokens_per_s": round(tokens_per_s), "sent_bytes": together.sent_bytes, "peak_bytes": together.peak_bytes,
            "eval_loss": evaluation.map(|it| finite(it.loss)),
        });
        if config.training.local_steps.is_some() {
            line["outer_step"] = json!(step.averaged);
        }
        if let Some(z_loss) = step.z_loss {
            line["z_loss"] = finite(z_loss);
        }
        if config.training.gradient_noise_scale.is_some() {
            line["gradient_noise_scale"] = json!(self.noise_scale.samples());
        }
        if let Some(lengths) = &self.corpus.sampler.lengths {
            line["seqlen"] = json!(lengths.at(step.step));
        }
        if self.corpus.sampler.token_batches.is_some() {
            line["micro_batches"] = json!(self.engine.settings().micro_batches * self.engine.replicas());
        }
        for (index, metric) in self.task.metrics.iter().enumerate() {
            line[format!("eval_{}", metric.name())] = json!(evaluation.map(|it| it.metrics[index].1));
        }
        for (name, loss) in evaluation.iter().flat_map(|evaluation| &evaluation.by_dataset) {
            line[format!("eval_loss_{name}")] = finite(*loss);
        }
        if slow.is_some() {
            line["rank_ms"] = json!(together.own_ms.iter().copied().map(round).collect::<Vec<_>>());
        }
        let scalar = |metric: &'static metric::Metric, value| Scalar { metric, value };
        let mut scalars = vec![
            scalar(&metric::TRAIN_LOSS, f64::from(step.loss)),
            scalar(&metric::LR, step.lr),
            scalar(&metric::GRAD_NORM, step.grad_norm),
            scalar(&metric::STEP_TIME, seconds * 1e3),
            scalar(&metric::DATA_WAIT, together.data_wait_ms),
            scalar(&metric::TOKENS_PER_SECOND, tokens_per_s),
            scalar(&metric::PEAK_BYTES, together.peak_bytes as f64),
            scalar(&metric::SENT_BYTES, together.sent_bytes as f64),
            scalar(&metric::SKIPPED, f64::from(u8::from(step.skipped))),
        ];
        let lengths = self.corpus.sampler.lengths.as_ref();
        scalars.extend(lengths.map(|lengths| scalar(&metric::SEQLEN, lengths.at(step.step) as f64)));
        scalars.extend(step.z_loss.map(|z_loss| scalar(&metric::Z_LOSS, f64::from(z_loss))));
        scalars.extend(self.noise_scale.samples().map(|samples| scalar(&metric::NOISE_SCALE, samples)));
        scalars.extend(step.loss_scale.map(|scale| scalar(&metric::LOSS_SCALE, scale)));
        if let Some(evaluation) = evaluation {
            scalars.push(scalar(&metric::EVAL_LOSS, f64::from(evaluation.loss)));
            let values = self.task.metrics.iter().zip(&evaluation.metrics);
            scalars.extend(values.map(|(metric, (_, value))| scalar(metric.monitored, *value)));
            let sets = self.corpus.eval_sets.iter().zip(&evaluation.by_dataset);
            scalars.extend(sets.map(|(set, (_, loss))| scalar(set.monitored, f64::from(*loss))));
        }
        if config.wall_clock_breakdown {
            scalars.extend(self.breakdown.scalars());
        }
        scalars.extend(files.monitors.of_machine());
        files.monitors.said().iter().for_each(|line| self.progress.say(line));
        let (samples, rank_ms) = (self.engine.samples(), together.own_ms.clone());
        let record = Record { step: step.step, samples, time: metric::now(), scalars, rank_ms };
        files.monitors.give(&record).iter().for_each(|word| self.progress.warn(word));
        let written = files.folder.metrics(&line);
        files.log(step.step, written, &self.progress)
    }
}

/// Formats the message about a step whose gradients overflowed.
fn overflow(step: u64, before: f64, after: f64) -> String {
    let then =
        if after == before { "the scale stays the same".to_string() } else { format!("the scale is now {after}") };
    format!("step {step:>6}  gradients overflowed at a loss scale of {before}, so the update was skipped; {then}")
}

fn round(x: f64) -> f64 {
    (x * 10.0).round() / 10.0
}

/// Converts a number to JSON. NaN and infinities become null. A finite value is written with the fewest digits that
/// parse to the same f32 bits.
pub(in super::super) fn finite(x: f32) -> Value {
    x.to_string().parse::<f64>().ok().filter(|x| x.is_finite()).map_or(Value::Null, |x| json!(x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_loss_parses_to_the_same_bits(bits: u32) {
            let x = f32::from_bits(bits);
            let written = finite(x).to_string();
            let read = written.parse::<f64>().map(|x| x as f32).ok();
            prop_assert_eq!(read.map(f32::to_bits), x.is_finite().then_some(bits));
        }
    }
}
