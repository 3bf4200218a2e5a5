//! Collectives in 8 and 4 bits send the bytes of the closed form.

use zero_engine::pipeline::Instruction;
use zero_engine::zoo;
use zero_optim::BlockCodes;
use zero_partition::{Payload, expected_payload};

use super::{BOTH, GRADIENTS, WEIGHTS};
use crate::sharding::bytes::all_reduced;
use crate::world::{BF16, batch, engine_of, gpt2_config, world};

/// In each of R shard groups, with n ranks in near groups of k, a gather sends the 8-bit codes of all Ψ elements n − 1
/// times. A reduction sends the 8-bit codes of Ψ elements k − 1 times within each near group. Between near groups, it
/// sends their 4-bit codes (n − k)/k times. If each near group is a host, and each host sends only once the data that
/// several ranks of another host need, a host sends the equivalent of 0.75Ψ(n − k)/n 16-bit values.
#[test]
fn bytes_sent_match_the_closed_form() {
    const MICRO_BATCHES: usize = 2;
    for (replicates, shards, near) in [(1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 4, 2), (1, 6, 2), (1, 6, 3), (2, 4, 2)] {
        for (stage, keys) in [(3u8, WEIGHTS), (3, BOTH), (2, GRADIENTS)].into_iter().filter(|of| near == 1 || of.0 == 3)
        {
            let ranks = replicates * shards;
            let text = format!(
                "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {MICRO_BATCHES}\n{BF16}\n\
                 mesh: {{data_parallel_replicate_degree: {replicates}}}\n\
                 zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0, \
                 stage3_max_reuse_distance: 0, zero_hpz_partition_size: {near}, {keys}}}"
            );
            let measured = world(ranks, |comm| {
                let rank = comm.rank();
                let layers =
                    zoo::gpt2(&zoo::Gpt2Config { vocab_size: 64, n_embd: 256, n_inner: None, ..gpt2_config() });
                let mut engine = engine_of(layers, comm, &text);
                let sent = engine.train_batch(&batch(0, ranks * MICRO_BATCHES)).unwrap().sent_bytes;
                let (zero, groups) = (engine.zero(), engine.zero().groups());
                let place = (groups.mesh(), groups.at());
                let options = &engine.settings().zero;
                let payload = expected_payload(engine.program(), zero.layout(), place, 2, options, |_| 0);
                let [norm, losses] =
                    [zero_optim::exact_sum::LIMBS, MICRO_BATCHES].map(|elements| all_reduced(elements, ranks, rank));
                assert_eq!(sent, payload.total() + (8 * norm + 4 * losses) as u64, "{text}, rank {rank}");
                let segments = zero.layout().segments();
                let bytes = |codes: BlockCodes, segment: usize| -> usize {
                    segments[segment].pieces.iter().map(|piece| codes.bytes(piece.range.len())).sum()
                };
                let elements = |ids: &[usize]| ids.iter().map(|&id| segments[id].elements()).sum::<usize>();
                let [mut gathered, mut of_codes, mut again, mut refreshed] = [0; 4];
                for instruction in &engine.program().instructions {
                    match instruction {
                        Instruction::Gather { segments: ids } => {
                            gathered += elements(ids);
                            of_codes += ids.iter().map(|&id| bytes(BlockCodes::Int8, id)).sum::<usize>();
                        }
                        Instruction::GatherSecondary { segments: ids } => again += elements(ids),
                        Instruction::Refresh { segments: ids } => refreshed += elements(ids),
                        _ => {}
                    }
                }
                let reduced = |codes| (0..segments.len()).map(|segment| bytes(codes, segment)).sum::<usize>();
                let reduced = [BlockCodes::Int8, BlockCodes::Fp4].map(reduced);
                (zero.layout().elements(), payload, [gathered, of_codes, again, refreshed], reduced)
            });
            let (elements, _, [gathered, of_codes, again, refreshed], [in_8_bits, in_4_bits]) = measured[0];
            let (r, n, m) = (replicates, shards, MICRO_BATCHES);
            let k = if near > 1 { near } else { n };
            // Without codes, a single reduce-scatter sends 16-bit gradients directly to their owners.
            let (scatters, gathers) = (keys == WEIGHTS, if keys == GRADIENTS { 2 * refreshed } else { of_codes });
            let (reduced, between) = match scatters {
                true => ((k - 1) * 2 * elements, (n - k) * 2 * elements),
                false => (n / k * (k - 1) * in_8_bits, (n / k - 1) * in_4_bits),
            };
            let within = r * ((k - 1) * gathers + m * reduced + n / k * (k - 1) * again * 2);
            // Replicates sum their shards once per step, for all micro-batches together.
            let replicated = 2 * (r - 1) * 2 * elements;
            let across = r * ((n - k) * gathers + m * between) + replicated;
            let sum = |of: fn(&Payload) -> u64| measured.iter().map(|(_, payload, ..)| of(payload)).sum::<u64>();
            assert_eq!(sum(|payload| payload.within), within as u64, "{text}");
            assert_eq!(sum(|payload| payload.across), across as u64, "{text}");
            if near > 1 && !scatters {
                assert_eq!(gathered, elements, "{text}");
                let of_hosts = (n / k - 1) * (of_codes + in_4_bits);
                let formula = 0.75 * 2.0 * elements as f64 * (n / k - 1) as f64;
                assert!((of_hosts as f64 / formula - 1.0).abs() <= 0.01, "{of_hosts} {formula}: {text}");
            }
            // Scales add less than 1 %.
            assert!(of_codes >= gathered && of_codes as f64 <= 1.01 * gathered as f64, "{text}");
        }
    }
}
