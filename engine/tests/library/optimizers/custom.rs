//! Custom optimizers: they match their references, are bit-identical in every layout, resume, and use the planned
//! bytes.

use std::sync::Arc;

use zero_engine::comm::Communicator;
use zero_engine::optimizer::{CustomOptimizer, CustomStep, MatrixStates, Update};
use zero_engine::{Config, Engine, Layers, zoo};

use crate::optimizers::adafactor::resumes_a_large_matrix;
use crate::optimizers::groups::fifty_steps_agree_of;
use crate::optimizers::whole_parameters::text;
use crate::sharding::bytes::{assert_state, state_values};
use crate::sharding::on_disk::assert_offloads;
use crate::world::{
    Trajectory, assert_same, batch, engine_of, gpt2, gpt2_config, reproducible, resume, run_of, save, world,
};

// The optimizers of the example program.
#[path = "../../../../examples/src/adamax.rs"]
mod adamax;
#[path = "../../../../examples/src/shampoo.rs"]
mod shampoo;
use adamax::Adamax;
use shampoo::Shampoo;

const CUSTOM: &str = "optimizer: {type: Custom, params: {lr: 0.002, weight_decay: 0.1}}";

/// Updates by the sign of a momentum. For a matrix, the first state has fewer values than the matrix has elements. The
/// second state, which holds the momentum, has more.
#[derive(Debug)]
struct Wide;

impl CustomOptimizer for Wide {
    fn states(&self) -> &'static [&'static str] {
        &["few", "many", "unused"]
    }

    fn matrix(&self, name: &str, [rows, columns]: [usize; 2]) -> Option<MatrixStates> {
        let elements = rows * columns;
        let values = vec![columns, 2 * elements + 5];
        (!name.contains("wte")).then_some(MatrixStates { values, buffer_bytes: 0, multiply_adds: elements as u128 })
    }

    fn update(&self, step: &CustomStep, Update { params, grads, states, matrix }: Update<'_>) {
        for (i, (param, grad)) in params.iter_mut().zip(grads).enumerate() {
            let average = match (matrix, &mut *states) {
                (Some([_, columns]), [few, many]) => {
                    few[i % columns] += 0.1 * grad;
                    let last = many.len() - 1;
                    many[last - 2 * i] = 0.9 * many[last - 2 * i] + 0.1 * grad + 0.01 * few[i % columns];
                    many[last - 2 * i]
                }
                (None, [few, ..]) => {
                    few[i] = 0.9 * few[i] + 0.1 * grad;
                    few[i]
                }
                (matrix, states) => panic!("{matrix:?} with {} states", states.len()),
            };
            *param -= step.lr as f32 * average.signum();
        }
    }
}

const ADAMAX: Adamax = Adamax { betas: (0.9, 0.999), eps: 1e-8 };

fn shampoo() -> Arc<dyn CustomOptimizer> {
    Arc::new(Shampoo { epsilon: 1e-4, betas: (0.9, 0.999) })
}

fn all() -> [Arc<dyn CustomOptimizer>; 3] {
    [Arc::new(ADAMAX), shampoo(), Arc::new(Wide)]
}

/// A model of small matrices, because the time of Shampoo's update grows with the cube of a matrix's side.
fn model() -> Layers {
    zoo::gpt2(&zoo::Gpt2Config { n_embd: 16, n_inner: Some(32), resid_pdrop: 0.1, ..gpt2_config() })
}

fn custom_engine(optimizer: &Arc<dyn CustomOptimizer>, comm: Arc<dyn Communicator>, text: &str) -> Engine {
    engine_of(model().optimizer(Arc::clone(optimizer)), comm, text)
}

fn run(optimizer: &Arc<dyn CustomOptimizer>, ranks: usize, text: &str) -> Trajectory {
    run_of(|| model().optimizer(Arc::clone(optimizer)), ranks, 5, text)
}

/// Adamax without betas per group, and Shampoo by the formulas of the paper, where PyTorch computes matrix roots in
/// f64.
const REFERENCES: &str = "
class Adamax(torch.optim.Adamax):
    def __init__(self, groups, lr): super().__init__(groups, lr=lr)
class Shampoo(torch.optim.Optimizer):
    def __init__(self, groups, lr, eps=1e-4):
        super().__init__(groups, dict(lr=lr, weight_decay=0.0, eps=eps, t=0))
    def root(self, a, eps):
        values, vectors = torch.linalg.eigh(a)
        return vectors @ torch.diag((values.clamp(min=0) + eps) ** -0.25) @ vectors.T
    def step(self):
        for group in self.param_groups:
            group['t'] += 1
            for p in group['params']:
                g, s, eps = p.grad.double(), self.state[p], group['eps']
                if p.dim() == 2 and p.shape[0] not in (61, 16):
                    if not s: s.update(l=torch.zeros(p.shape[0], p.shape[0]), r=torch.zeros(p.shape[1], p.shape[1]))
                    s['l'] += (g @ g.T).float(); s['r'] += (g.T @ g).float()
                    d = self.root(s['l'].double(), eps) @ g @ self.root(s['r'].double(), eps)
                else:
                    if not s: s.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
                    s['m'] = (0.9 * s['m'].double() + (1 - 0.9) * g).float()
                    s['v'] = (0.999 * s['v'].double() + (1 - 0.999) * g * g).float()
                    b1, b2 = 1 - 0.9 ** group['t'], 1 - 0.999 ** group['t']
                    d = s['m'].double() / b1 / ((s['v'].double() / b2).sqrt() + eps)
                p.data = (p.data.double() * (1 - group['lr'] * group['weight_decay']) - group['lr'] * d).float()
";

#[test]
fn fifty_steps_agree_with_pytorch() {
    let custom = "type: Custom, params: {lr: 1.0e-3, weight_decay: 0.1}";
    let cases = [["GPT2", "Adamax", custom], ["Llama", "Adamax", custom], ["GPT2", "Shampoo", custom]];
    fifty_steps_agree_of(&["torch", "transformers"], REFERENCES, &cases, |name, layers| match name {
        "Shampoo" => layers.optimizer(shampoo()),
        _ => layers.optimizer(ADAMAX),
    });
}

#[test]
fn every_layout_is_bit_identical() {
    for (optimizer, dtype) in all().iter().zip(["", "bf16: {enabled: true}", ""]) {
        let more = format!("{CUSTOM}\n{dtype}");
        let expected = run(optimizer, 1, &reproducible(0, 1, &more));
        assert_ne!(expected.losses[0], expected.losses[4]);
        for (ranks, zero_stage) in [(2, 0), (2, 1), (4, 2), (4, 3)] {
            let got = run(optimizer, ranks, &reproducible(zero_stage, ranks, &more));
            assert_same(&expected, &got, &format!("{optimizer:?}, stage {zero_stage} on {ranks} ranks"));
        }
        let piped = format!("{more}\npipeline: {{stages: 2}}");
        assert_same(&expected, &run(optimizer, 4, &reproducible(3, 2, &piped)), &piped);
        let on_host = reproducible(2, 2, &more).replace("stage: 2", "stage: 2, offload_optimizer: {device: cpu}");
        assert_same(&expected, &run(optimizer, 2, &on_host), &on_host);
    }
}

/// Independent elements are updated in tiles. Matrices are updated as a whole, with states of more or fewer values.
#[test]
fn states_offload_to_disk() {
    let all: [Arc<dyn CustomOptimizer>; 2] = [Arc::new(ADAMAX), Arc::new(Wide)];
    for optimizer in &all {
        assert_offloads(CUSTOM, || gpt2().optimizer(Arc::clone(optimizer)));
    }
}

/// Independent elements are updated in bf16.
#[test]
fn bf16_updates_are_bit_identical() {
    let [adamax, ..] = all();
    let narrow =
        format!("{CUSTOM}\nbf16: {{enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}}");
    let expected = run(&adamax, 1, &reproducible(0, 1, &narrow));
    assert_ne!(expected.losses[0], expected.losses[4]);
    assert_same(&expected, &run(&adamax, 2, &reproducible(2, 2, &narrow)), &narrow);
}

#[test]
fn a_run_is_resumed_in_another_layout() {
    for optimizer in &all() {
        let whole = run(optimizer, 1, &reproducible(0, 1, CUSTOM));
        for (from, to) in [((1, 0), (4, 3)), ((4, 3), (2, 1))] {
            let folder = tempfile::tempdir().unwrap();
            let engine = |comm, (ranks, stage)| custom_engine(optimizer, comm, &reproducible(stage, ranks, CUSTOM));
            save((from.0, 3), folder.path(), |comm| engine(comm, from));
            let rest = resume((to.0, 2), folder.path(), |comm| engine(comm, to));
            assert_same(&whole.after(3), &rest, &format!("{optimizer:?}, {from:?} to {to:?}"));
        }
    }
}

/// The matrix is saved in several pieces. One of its states has fewer values than the matrix has elements, and the
/// other has more.
#[test]
fn a_large_matrix_is_resumed() {
    resumes_a_large_matrix(CUSTOM, |layers| layers.optimizer(Wide));
}

#[test]
fn bytes_match_the_formula() {
    for (optimizer, (ranks, zero_stage)) in all().iter().zip([(2, 2), (4, 3), (2, 1)]) {
        let folder = tempfile::tempdir().unwrap();
        let text = text(zero_stage, 1, &format!("{CUSTOM}\ntraining: {{ema: {{decay: 0.9}}}}"));
        let of_ranks = world(ranks, |comm| {
            let mut engine = custom_engine(optimizer, comm, &text);
            engine.train_batch(&batch(0, ranks)).unwrap();
            engine.save_checkpoint(folder.path()).unwrap();
            let held = assert_state(&engine, &text).optimizer;
            assert_eq!(held, 4 * state_values(engine.zero()), "{optimizer:?}");
            let of_parameter = |parameter: &zero_model::Parameter| {
                let average = parameter.elements();
                average
                    + match parameter.shape().dims() {
                        &[rows, columns] if let Some(matrix) = optimizer.matrix(parameter.name(), [rows, columns]) => {
                            matrix.values.iter().sum()
                        }
                        _ => optimizer.states().len() * parameter.elements(),
                    }
            };
            (held, engine.model().parameters().iter().map(of_parameter).sum::<usize>())
        });
        let total: u64 = of_ranks.iter().map(|(held, _)| held).sum();
        assert_eq!(total, 4 * of_ranks[0].1 as u64, "{optimizer:?}");
    }
}

#[test]
fn mistakes_are_errors() {
    #[derive(Debug)]
    struct Named(&'static [&'static str]);
    impl CustomOptimizer for Named {
        fn states(&self) -> &'static [&'static str] {
            self.0
        }
        fn update(&self, _: &CustomStep, _: Update<'_>) {}
    }
    #[derive(Debug)]
    struct Nameless;
    impl CustomOptimizer for Nameless {
        fn states(&self) -> &'static [&'static str] {
            &[]
        }
        fn matrix(&self, _: &str, _: [usize; 2]) -> Option<MatrixStates> {
            Some(MatrixStates { values: vec![1], buffer_bytes: 0, multiply_adds: 1 })
        }
        fn update(&self, _: &CustomStep, _: Update<'_>) {}
    }
    let error = |layers: Layers, text: &str| {
        let comm = zero_engine::comm::threads(1, &Default::default()).remove(0);
        let config = Config::with_world_size("test.yaml", format!("train_batch_size: 1\n{text}"), 1).unwrap();
        Engine::with_communicator(config, layers, comm).err().expect("an error").to_string()
    };
    let whole = "updates `transformer.wpe.weight` as a whole, which is not implemented";
    for (layers, text, expected) in [
        (
            gpt2(),
            CUSTOM.to_string(),
            "`type: Custom` selects the program's custom optimizer, but this program has none",
        ),
        (gpt2().optimizer(ADAMAX), "optimizer: {type: AdamW}".to_string(), "which the configuration does not use"),
        (
            gpt2().optimizer(Wide),
            format!("{CUSTOM}\nbf16: {{enabled: true, bf16_master_weights_and_grads: true}}"),
            &format!("{whole} in bf16"),
        ),
        (
            gpt2().optimizer(Nameless),
            CUSTOM.to_string(),
            "keeps 1 states of `transformer.wte.weight`, but names only 0",
        ),
        (
            gpt2().optimizer(Named(&["a", "b", "a"])),
            CUSTOM.to_string(),
            "has a state named `a`, but this name is already taken",
        ),
        (
            gpt2().optimizer(Named(&["ema"])),
            CUSTOM.to_string(),
            "has a state named `ema`, but this name is already taken",
        ),
    ] {
        let said = error(layers, &text);
        assert!(said.contains(expected), "{said}");
    }
}
