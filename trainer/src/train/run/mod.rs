//! Runs the training steps, and logs and reports them.

mod callbacks;
mod record;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use zero_comm::Buffer;
use zero_config::Training;

use super::corpus::Corpus;
use super::evaluation::{self, Evaluation};
use super::files::Files;
use super::mixing::Mixing;
use super::options::Finished;
use super::output::progress::Progress;
use super::prefetch::Prefetcher;
use super::report::Report;
use super::report::breakdown::Breakdown;
use super::report::stragglers::Stragglers;
use super::report::{communication, profile, trace};
use super::sample;
use super::saves::Saves;
use super::stopping::best::BestCheckpoint;
use super::stopping::divergence::Divergence;
use super::stopping::early_stop::EarlyStop;
use super::stopping::noise_scale::NoiseScale;
use super::task::Task;
use super::token_batches::MicroBatchSamples;
use crate::monitor::RunStatus;
use crate::process::signals::Requests;
use zero_engine::Error;
use zero_engine::{Engine, Step};

pub(super) use record::finite;

/// The state of a run on this rank.
pub(super) struct Run<'a> {
    engine: Engine,
    corpus: Corpus,
    task: Task<'a>,
    early: EarlyStop,
    saves: Saves,
    progress: Progress,
    report: Report,
    divergence: Divergence,
    noise_scale: NoiseScale,
    stragglers: Stragglers,
    breakdown: Breakdown,
    seen: communication::Seen,
    /// Number of tokens in the last step, including padding. A row of a table counts as one token.
    positions: usize,
    /// Total duration in seconds of all steps except the first, and how long these steps waited for data.
    waited: [f64; 2],
    /// Loss of the last step of this run.
    pub(super) loss: Option<f32>,
    pub(super) evaluation: Option<Evaluation>,
    /// Whether a callback has ended the run. Until the ranks exchange this flag, only rank 0 knows its value.
    ends: bool,
}

/// Sums and maxima after a step over all ranks or, if replicates train independently, over the ranks of this rank's
/// replicate.
struct Together {
    sent_bytes: u64,
    peak_bytes: u64,
    micros: u64,
    signal: i64,
    /// Whether a rank has received a request to save a checkpoint.
    save: bool,
    /// Milliseconds of each rank's own work, by rank. Empty if replicates have trained independently.
    own_ms: Vec<f64>,
    /// Longest time in milliseconds that a rank waited for data.
    data_wait_ms: f64,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        engine: Engine,
        (corpus, task): (Corpus, Task<'a>),
        (early, divergence, noise_scale, saves): (EarlyStop, Divergence, NoiseScale, Saves),
        progress: Progress,
        report: Report,
    ) -> Self {
        let stragglers = Stragglers::new(&**engine.communicator());
        let (breakdown, seen) = (Breakdown::default(), communication::Seen::default());
        let (loss, evaluation) = (None, None);
        Self {
            engine,
            corpus,
            task,
            early,
            divergence,
            noise_scale,
            saves,
            progress,
            report,
            stragglers,
            breakdown,
            seen,
            positions: 0,
            waited: [0.0; 2],
            loss,
            evaluation,
            ends: false,
        }
    }

    pub(super) fn train(
        &mut self,
        steps: u64,
        requests: &Requests,
        mut files: Option<&mut Files>,
    ) -> Result<Finished, Error> {
        let training = self.engine.config().training.clone();
        let left = steps.saturating_sub(self.engine.steps());
        let (profiler, next) = (&self.engine.config().flops_profiler, self.engine.steps() + 1);
        if files.is_some() && left > 0 && profiler.enabled && !(next..=steps).contains(&(profiler.profile_step as u64))
        {
            let step = profiler.profile_step;
            self.progress.warn(&format!(
                "`flops_profiler.profile_step` is {step}, but this run trains the steps {next} to {steps}: no step is profiled"
            ));
        }
        let end = self.corpus.sampler.batch_sizes.after(self.engine.samples(), left);
        let workers = (training.dataloader_num_workers, training.dataloader_prefetch_factor);
        let mut batches = Prefetcher::new(self.corpus.sampler.clone(), workers, end);
        while self.engine.steps() < steps {
            let micro_batches = batches.begin(self.engine.steps() + 1, self.engine.samples());
            let micro_batches =
                micro_batches.inspect_err(|error| self.engine.communicator().abort(&error.to_string()))?;
            let rows: Vec<usize> = micro_batches.iter().map(|micro_batch| micro_batch.samples.len()).collect();
            self.positions = micro_batches.iter().map(MicroBatchSamples::positions).sum();
            self.divergence.prepare(&mut self.engine);
            self.breakdown.begin(self.engine.timing());
            let profiles = self.engine.config().flops_profiler.is_due(self.engine.steps() + 1);
            if profiles {
                self.engine.begin_profile();
            }
            let mut step = self.engine.train_micro_batches(&rows, |index| batches.load(index))?;
            if step.step >= steps && !self.engine.replicates_are_equal() {
                let (started, sent_before) = (Instant::now(), self.engine.stats().sent_bytes());
                self.engine.outer_step()?;
                step.averaged = true;
                step.duration += started.elapsed();
                step.sent_bytes += self.engine.stats().sent_bytes() - sent_before;
            }
            self.breakdown.end(self.engine.timing());
            if profiles {
                self.profile(&step)?;
            }
            let together = self.gather(&step, requests, batches.waited())?;
            // The first step is not counted, because its micro-batches are not loaded ahead.
            if self.loss.is_some() {
                self.waited[0] += together.micros as f64 / 1e6;
                self.waited[1] += together.data_wait_ms / 1e3;
            }
            self.saves.look(&mut self.engine, &self.progress)?;
            self.loss = Some(step.loss);
            let evaluates = training.eval_every > 0 && step.step.is_multiple_of(training.eval_every as u64);
            let evaluates = evaluates || self.task.evaluates_last && step.step >= steps;
            let evaluation = if evaluates { self.evaluate()? } else { None };
            step.noise.into_iter().for_each(|of_step| self.noise_scale.add(of_step));
            self.record(&step, &together, evaluation.as_ref(), files.as_deref_mut())?;
            let is_ended = self.call_back(&step, steps, &together, evaluation.as_ref())?;
            // If replicates train independently, one can diverge while the others do not. `abort` tells the other
            // replicates.
            let judged = self.divergence.judge(&step, &self.progress);
            judged.inspect_err(|error| self.engine.communicator().abort(&error.to_string()))?;
            if training.compare_replicas_every > 0 && step.step.is_multiple_of(training.compare_replicas_every as u64) {
                self.engine.compare_replicas()?;
            }
            let is_best = match &evaluation {
                Some(evaluation) => self.saves.improves(&mut self.engine, evaluation, &self.progress)?,
                None => false,
            };
            if together.signal != 0 {
                self.progress.say(&format!("stopping after step {}: received signal {}", step.step, together.signal));
                return Ok(Finished::Stopped(together.signal as i32));
            }
            let is_early = evaluation.is_some_and(|evaluation| self.early.is_over(&evaluation));
            let is_over = is_early || is_ended;
            if together.save {
                self.progress.say(&format!("saving after step {}: received SIGUSR1", step.step));
            }
            let saves = training.save_every > 0 && step.step.is_multiple_of(training.save_every as u64);
            let saves = saves || together.save || is_best;
            let ends = is_over || step.step >= steps;
            if saves && (!ends || !training.save_last) {
                let state = self.state();
                self.saves.on_the_way(&mut self.engine, state, &self.progress)?;
            }
            if is_over {
                let why = if is_early { self.early.to_string() } else { "a callback ended the run".into() };
                self.progress.say(&format!("stopping after step {}: {why}", step.step));
                break;
            }
        }
        Ok(Finished::Done)
    }

    /// Prints the profile of `flops_profiler` after a profiled step; a collective.
    fn profile(&mut self, step: &Step) -> Result<(), Error> {
        let Some(profile) = self.engine.take_profile() else { return Ok(()) };
        let found = profile.together(&**self.engine.communicator())?;
        if self.engine.communicator().rank() > 0 {
            return Ok(());
        }
        let options = &self.engine.config().flops_profiler;
        let text = profile::report(&self.engine, step, &found, options);
        match &options.output_file {
            None => self.progress.say(&text),
            Some(path) => match profile::write(path, &text) {
                Ok(()) => self.progress.say(&format!("profile     {}", path.display())),
                Err(error) => self.progress.warn(&format!(
                    "cannot write the profile: {error}; training continues; set `flops_profiler.output_file` to another file"
                )),
            },
        }
        Ok(())
    }

    /// Exchanges the counters and requests of all ranks after a step. While replicates train independently, the ranks
    /// of each replicate exchange only counters, among themselves. They exchange requests after an outer step, so that
    /// all replicates stop or save at the same step.
    fn gather(&mut self, step: &Step, requests: &Requests, data_wait: Duration) -> Result<Together, Error> {
        let peak = self.engine.zero().ledger().peak_total() as i64;
        let own_micros = self.stragglers.own_ms(&self.engine) * 1e3;
        let is_together = self.engine.replicates_are_equal();
        let (stop, save) = match is_together {
            true => (requests.stop(), i64::from(requests.take_save())),
            false => (0, 0),
        };
        let (micros, sent) = (step.duration.as_micros() as i64, step.sent_bytes as i64);
        let own = [peak, micros, stop, sent, own_micros as i64, save, data_wait.as_micros() as i64];
        let comm = if is_together { self.engine.communicator() } else { self.engine.zero().groups().world() };
        let all = Buffer::I64(vec![0; own.len() * comm.size()]);
        let all = comm.all_gather(Buffer::I64(own.to_vec()), all, &vec![own.len(); comm.size()]);
        let all = all.wait()?.output.into_i64()?;
        let column = |index: usize| all.chunks_exact(own.len()).map(move |row| row[index]);
        Ok(Together {
            peak_bytes: column(0).max().unwrap_or(0) as u64,
            micros: column(1).max().unwrap_or(0) as u64,
            signal: column(2).max().unwrap_or(0),
            save: column(5).any(|asked| asked != 0),
            sent_bytes: column(3).sum::<i64>() as u64,
            own_ms: if is_together { column(4).map(|micros| micros as f64 / 1e3).collect() } else { vec![] },
            data_wait_ms: column(6).max().unwrap_or(0) as f64 / 1e3,
        })
    }

    /// Saves the final checkpoint. A run that a signal stopped always saves a checkpoint, even with `save_last: false`,
    /// so that it can be resumed.
    pub(super) fn save_last(&mut self, finished: Finished, requests: &Requests) -> Result<Option<PathBuf>, Error> {
        let saved = match finished {
            Finished::Done if !self.engine.config().training.save_last => {
                self.engine.finish_save()?;
                self.saves.look(&mut self.engine, &self.progress)?;
                None
            }
            Finished::Done | Finished::Stopped(_) => {
                let state = self.state();
                Some(self.saves.last(&mut self.engine, state, &self.progress)?)
            }
        };
        self.saves.finish(&self.engine, requests, &self.progress)?;
        Ok(saved)
    }

    /// Returns the state that checkpoints hold in addition to the engine's.
    fn state(&self) -> Value {
        let mut state = self.early.state();
        state["best"] = self.saves.best.state();
        state["divergence"] = self.divergence.state();
        if self.engine.config().training.gradient_noise_scale.is_some() {
            state["noise_scale"] = self.noise_scale.state();
        }
        state["tokenizer"] = self.corpus.tokenizer.fingerprint().into();
        state["training_samples"] = self.corpus.sampler.data.len().into();
        state["mixture"] = self.corpus.sampler.mixing.as_ref().map_or(Value::Null, Mixing::state);
        state
    }

    fn evaluate(&mut self) -> Result<Option<Evaluation>, Error> {
        let found = evaluation::evaluate(&mut self.engine, &self.corpus, &self.task.metrics)?;
        self.evaluation.clone_from(&found);
        Ok(found)
    }

    /// Generates the text for `training.sample`, if it is set; a collective. Tokens that the tokenizer cannot decode
    /// cause only a warning, because the run itself has succeeded.
    pub(super) fn sample(&mut self) -> Result<Option<String>, Error> {
        let Some(sample) = self.engine.config().training.sample.clone() else { return Ok(None) };
        if self.corpus.vocabulary.is_none() || self.engine.config().preference.is_some() {
            return Ok(None);
        }
        let length = self.corpus.tokens_per_sample();
        let tokenizer = &self.corpus.tokenizer;
        let generate = |engine: &mut Engine| sample::generate(engine, tokenizer, &sample, length);
        match evaluation::with_evaluated(&mut self.engine, generate) {
            Ok(text) => Ok(Some(text)),
            Err(error @ Error::Data(_)) => {
                if self.engine.communicator().rank() == 0 {
                    self.progress.warn(&format!("cannot decode the sample: {error}"));
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the number of optimizer steps of the run so far.
    pub(super) fn steps(&self) -> u64 {
        self.engine.steps()
    }

    /// Returns the best checkpoint.
    pub(super) fn best(&self) -> Option<BestCheckpoint> {
        self.saves.best.checkpoint()
    }

    pub(super) fn finish(
        &self,
        files: Option<&mut Files>,
        saved: Option<&Path>,
        text: Option<&str>,
        finished: Finished,
    ) -> Result<(), Error> {
        self.progress.finish();
        let report = self.report.value(&self.engine, finished)?;
        let trace = trace::of_all_ranks(&self.engine, self.report.first_step(&self.engine))?;
        let Some(files) = files else { return Ok(()) };
        let outcome = if finished == Finished::Done { RunStatus::Done } else { RunStatus::Stopped };
        let words = files.monitors.finish(outcome);
        files.monitors.said().iter().for_each(|line| self.progress.say(line));
        words.iter().for_each(|word| self.progress.warn(word));
        // A complete run that was started again keeps its report.
        if self.report.has_trained() || !files.folder.has_report() {
            files.folder.report(&report)?;
        }
        if let Some(trace) = trace {
            files.folder.trace(&trace)?;
        }
        let comms_logger = &self.engine.config().comms_logger;
        if comms_logger.enabled {
            self.progress.say(&communication::summary(&self.engine.zero().groups().sizes(), comms_logger));
        }
        if let Some(text) = text {
            self.progress.say(&format!("\n--- sample ---\n{text}\n--------------\n"));
        }
        let out = files.folder.path();
        if let Some(hint) = waiting_hint(self.waited, &self.engine.config().training) {
            self.progress.say(&hint);
        }
        self.progress.say(&format!("{}", self.report));
        if let Some(saved) = saved {
            self.progress.say(&format!("checkpoint  {}", saved.display()));
        }
        if let Some(best) = self.saves.best.line() {
            self.progress.say(&best);
        }
        self.progress.say(&format!("run         {}  (resolved.yaml, metrics.jsonl, report.json)", out.display()));
        Ok(())
    }
}

/// Returns a hint if the steps waited for data for at least one second and at least a tenth of their time.
fn waiting_hint([all, waited]: [f64; 2], training: &Training) -> Option<String> {
    let Training { dataloader_num_workers: workers, dataloader_prefetch_factor: factor, .. } = training;
    (waited >= 1.0 && waited >= 0.1 * all).then(|| {
        format!(
            "hint        the steps waited for data {:.0} % of their time; increase `training.dataloader_num_workers` \
             (now {workers}) or `training.dataloader_prefetch_factor` (now {factor})",
            100.0 * waited / all
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_for_data_give_a_hint() {
        let training = zero_config::Config::parse("ds.yaml", "train_batch_size: 1").unwrap().training;
        for quiet in [[0.0, 0.0], [2.0, 0.9], [100.0, 9.9]] {
            assert_eq!(waiting_hint(quiet, &training), None, "{quiet:?}");
        }
        let hint = waiting_hint([10.0, 4.0], &training).unwrap();
        assert!(hint.contains("40 %") && hint.contains("`training.dataloader_num_workers` (now 1)"), "{hint}");
    }
}
