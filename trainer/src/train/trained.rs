//! Runs configurations on ranks that are threads, for tests.

use std::sync::{Arc, Mutex};

use zero_comm::{Options, threads};
use zero_config::Config;
use zero_engine::Error;

use super::{Output, Resume, Summary};
use crate::Trainer;

/// Runs the configuration `text` on `ranks` threads. Returns the outcome of the first rank, and its losses.
pub(super) fn run(text: &str, ranks: usize, resume: Option<Resume>) -> (Result<Summary, Error>, Vec<f32>) {
    let losses = Arc::new(Mutex::new(vec![]));
    let outcome = std::thread::scope(|scope| {
        let fit = |comm: Arc<dyn zero_comm::Communicator>| {
            let config = Config::with_world_size("ds.yaml", text, ranks).unwrap_or_else(|e| panic!("{text}\n{e}"));
            let (losses, is_first) = (Arc::clone(&losses), comm.rank() == 0);
            let trainer = Trainer::new(config).output(Output::Quiet).communicator(comm).on_step(move |step| {
                if is_first {
                    losses.lock().unwrap().push(step.loss);
                }
            });
            match resume.clone() {
                Some(resume) => trainer.resume(resume).fit(),
                None => trainer.fit(),
            }
        };
        let started: Vec<_> =
            threads(ranks, &Options::default()).into_iter().map(|comm| scope.spawn(move || fit(comm))).collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>().remove(0)
    });
    let losses = losses.lock().unwrap().clone();
    (outcome, losses)
}
