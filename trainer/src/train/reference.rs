//! Computes the log-probabilities of both answers of each pair under the reference model. The reference is the model at
//! the start of training.
//!
//! The log-probabilities are computed once, before the first step, and kept in the run's folder. A resumed run reads
//! them from a file, because its model is no longer the reference.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{Device, Tensor, safetensors};
use zero_comm::{Buffer, ReduceOp};
use zero_engine::format::counted;
use zero_engine::{Engine, Error};

use super::corpus::Corpus;
use super::evaluation::IN_A_ROW;
use super::output::progress::Progress;
use crate::data::{Dataset, PairDataset};

/// The file in the run's folder. It has one tensor `[pairs, 2]` in f32 per data set. The tensor's name contains the
/// checksum of the pairs.
const FILE: &str = "reference_log_probs.safetensors";

/// Computes the log-probabilities of all pairs and, if `keeps` is set, writes them to the run's folder. If the run
/// resumes from the checkpoint `from`, reads them instead. A collective.
///
/// # Errors
/// Fails if a resumed run does not find the log-probabilities of its pairs, or if a rank is lost.
pub(super) fn prepare(
    engine: &mut Engine,
    corpus: &Corpus,
    out: &Path,
    (from, keeps): (Option<&Path>, bool),
    progress: &Progress,
) -> Result<(), Error> {
    if corpus.reference.is_empty() {
        return Ok(());
    }
    if let Some(checkpoint) = from {
        return read(corpus, out, checkpoint);
    }
    let started = Instant::now();
    let mut tensors = HashMap::new();
    for pairs in &corpus.reference {
        let log_probs = compute(engine, corpus, pairs)?;
        let tensor = Tensor::from_slice(log_probs.as_flattened(), (log_probs.len(), 2), &Device::Cpu)?;
        tensors.insert(name(pairs)?, tensor);
        pairs.set_reference(log_probs);
    }
    if keeps && engine.communicator().rank() == 0 {
        let (path, temporary) = (out.join(FILE), out.join(format!(".{FILE}")));
        fs::create_dir_all(out).map_err(Error::io(out))?;
        safetensors::save(&tensors, &temporary)?;
        fs::rename(&temporary, &path).map_err(Error::io(&path))?;
        let count = corpus.reference.iter().map(|pairs| pairs.len()).sum();
        progress.say(&format!(
            "reference log-probabilities of {} computed in {:.1} s",
            counted(count, "pair", "pairs"),
            started.elapsed().as_secs_f64()
        ));
    }
    Ok(())
}

fn name(pairs: &PairDataset) -> Result<String, Error> {
    Ok(format!("pairs-{:08x}", pairs.checksum()?))
}

/// Evaluates every pair once. In the last round, replicas without a remaining pair run a pair whose result is not used.
fn compute(engine: &mut Engine, corpus: &Corpus, pairs: &PairDataset) -> Result<Vec<[f32; 2]>, Error> {
    let rows = engine.config().train_micro_batch_size_per_gpu;
    let (count, replica, replicas) = (pairs.len(), engine.replica(), engine.replicas());
    let start = |round: usize| (round * replicas + replica) * rows;
    // The bits of each number, or 0 if another rank computes the number.
    let mut bits = vec![0i64; 2 * count];
    // All ranks that share a sequence or its layers compute the same numbers, and the first one contributes them.
    let groups = engine.zero().groups();
    let contributes = groups.tensor_index() == 0 && groups.context().is_none_or(|context| context.rank() == 0);
    let rounds = count.div_ceil(rows * replicas);
    for first in (0..rounds).step_by(IN_A_ROW) {
        let load = |batch: usize| corpus.evaluation_batch(pairs, start(first + batch) as u64, rows);
        engine.eval_observed(IN_A_ROW.min(rounds - first), load, |seen| {
            let sums = seen.outputs()?.single()?.to_vec2::<f32>()?;
            for (row, sums) in sums.iter().enumerate() {
                let pair = start(first + seen.micro_batch) + row;
                if pair < count && contributes {
                    bits[2 * pair] = i64::from(sums[0].to_bits());
                    bits[2 * pair + 1] = i64::from(sums[1].to_bits());
                }
            }
            Ok(())
        })?;
    }
    let bits = engine.communicator().all_reduce(Buffer::I64(bits), ReduceOp::Sum).wait()?.into_i64()?;
    let log_prob = |bits: i64| f32::from_bits(bits as u32);
    let all: Vec<[f32; 2]> = bits.chunks_exact(2).map(|pair| [log_prob(pair[0]), log_prob(pair[1])]).collect();
    match all.iter().position(|pair| pair.iter().any(|log_prob| !log_prob.is_finite())) {
        None => Ok(all),
        Some(pair) => Err(Error::Batch(format!(
            "the reference model's log-probabilities of pair {pair} are not finite: {} and {}",
            all[pair][0], all[pair][1]
        ))),
    }
}

fn read(corpus: &Corpus, out: &Path, checkpoint: &Path) -> Result<(), Error> {
    // Checkpoints are in RUN/checkpoints.
    let of_run = checkpoint.ancestors().nth(2).map(PathBuf::from);
    let folders = [Some(out.to_path_buf()), of_run];
    let Some(path) = folders.into_iter().flatten().map(|folder| folder.join(FILE)).find(|path| path.is_file()) else {
        let message = format!("{} has no {FILE}, which a resumed run needs", out.display());
        let help = "resume a run that trained with `preference`, or copy the file from that run's folder";
        return Err(Error::setting("preference", message, help));
    };
    let tensors = safetensors::load(&path, &Device::Cpu)?;
    for pairs in &corpus.reference {
        let Some(tensor) = tensors.get(&name(pairs)?) else {
            let message = format!(
                "{} was computed from different pairs than those in `data.train` and `data.eval`",
                path.display()
            );
            let help = "resume with the files, the tokenizer and the `data` section that the run began with";
            return Err(Error::setting("preference", message, help));
        };
        if tensor.dims() != [pairs.len(), 2] {
            let message =
                format!("{} has {:?} log-probabilities for {} pairs", path.display(), tensor.dims(), pairs.len());
            return Err(Error::setting("preference", message, "restore the file from a backup of the run's folder"));
        }
        let rows = tensor.to_vec2::<f32>()?;
        pairs.set_reference(rows.iter().map(|row| [row[0], row[1]]).collect());
    }
    Ok(())
}
