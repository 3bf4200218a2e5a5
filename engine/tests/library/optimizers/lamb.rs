//! LAMB: losses match timm and DeepSpeed's formulas, state has the planned bytes, and mistakes are errors.

use zero_engine::{Config, Engine, zoo};
use zero_optim::exact_sum::LIMBS;

use crate::optimizers::groups::fifty_steps_agree;
use crate::optimizers::whole_parameters::{LAMB, text};
use crate::sharding::bytes::{all_reduced, assert_state};
use crate::world::{batch, engine, gpt2_config, world};

/// The formulas of DeepSpeed's kernel, written in PyTorch, since the kernel needs a GPU.
const DEEPSPEED: &str = "
class DeepSpeedLamb(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, inside=False, correction=True, least=0.01, most=10.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=0.0))
        self.eps, self.inside, self.correction, self.least, self.most = eps, inside, correction, least, most
        self.steps = 0
    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            b1, b2 = group['betas']
            rate = group['lr']
            if self.correction: rate *= (1 - b2 ** self.steps) ** 0.5 / (1 - b1 ** self.steps)
            for p in group['params']:
                state = self.state[p]
                if not state: state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
                m, v = state['m'], state['v']
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                root = (v + self.eps).sqrt() if self.inside else v.sqrt() + self.eps
                u = m / root + group['weight_decay'] * p
                of_p, of_u = p.norm().item(), u.norm().item()
                ratio = min(max(of_p / of_u, self.least), self.most) if of_p != 0 and of_u != 0 else 1.0
                p.sub_(u, alpha=rate * ratio)
def timm_lamb(params, lr):
    import timm.optim
    return timm.optim.Lamb(params, lr=lr, eps=1e-6, bias_correction=False, max_grad_norm=None, always_adapt=True)
timm_lamb.__init__ = DeepSpeedLamb.__init__
";

#[test]
fn fifty_steps_agree_with_deepspeeds_formulas() {
    let cases = [
        ["GPT2", "DeepSpeedLamb, eps=1e-6", "type: Lamb, params: {lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}"],
        [
            "Llama",
            "DeepSpeedLamb, eps=1e-6, inside=True, correction=False, least=0.3, most=0.7",
            "type: Lamb, params: {lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1, eps_inside_sqrt: true, \
             bias_correction: false, min_coeff: 0.3, max_coeff: 0.7}",
        ],
    ];
    fifty_steps_agree(&["torch", "transformers"], DEEPSPEED, &cases);
}

/// timm corrects the bias as the paper does, unlike DeepSpeed, and does not bound the trust ratio. The test therefore
/// switches off bias correction and our bounds.
#[test]
fn fifty_steps_agree_with_timm() {
    let ours = "type: Lamb, params: {lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1, bias_correction: false, \
                min_coeff: 0, max_coeff: 1.0e+30}";
    let cases = [["GPT2", "timm_lamb", ours], ["Llama", "timm_lamb", ours]];
    fifty_steps_agree(&["torch", "transformers", "timm"], DEEPSPEED, &cases);
}

/// State takes as many bytes as AdamW's. At ZeRO stages 1 to 3, a step also sends the limbs of two exact sums for each
/// parameter.
#[test]
fn bytes_match_the_formula() {
    let adamw = "optimizer: {type: AdamW, params: {lr: 0.01}}";
    for (ranks, zero_stage) in [(1, 0), (2, 0), (2, 1), (2, 2), (4, 3)] {
        let step = |optimizer: &str| {
            world(ranks, |comm| {
                let rank = comm.rank();
                let mut engine = engine(comm, &text(zero_stage, 1, optimizer));
                let sent = engine.train_batch(&batch(0, ranks)).unwrap().sent_bytes;
                assert_state(&engine, &format!("stage {zero_stage}, rank {rank} of {ranks}"));
                (sent, engine.model().parameters().len())
            })
        };
        for (rank, ((lamb, tensors), (adamw, _))) in step(LAMB).into_iter().zip(step(adamw)).enumerate() {
            let sums = if zero_stage == 0 { 0 } else { 8 * all_reduced(2 * LIMBS * tensors, ranks, rank) };
            assert_eq!(lamb, adamw + sums as u64, "stage {zero_stage}, rank {rank} of {ranks}");
        }
    }
}

#[test]
fn mistakes_are_errors() {
    let error = |params: &str, zero: &str| {
        let text = format!("train_batch_size: 1\noptimizer: {{type: Lamb{params}}}\nzero_optimization: {{{zero}}}");
        let comm = zero_engine::comm::threads(1, &Default::default()).remove(0);
        match Config::with_world_size("test.yaml", &text, 1) {
            Err(error) => error.to_string(),
            Ok(config) => Engine::with_communicator(config, zoo::gpt2(&gpt2_config()), comm).err().unwrap().to_string(),
        }
    };
    let bounds = error(", params: {min_coeff: 2, max_coeff: 1}", "stage: 1");
    assert!(
        bounds.contains("the smallest trust ratio, `min_coeff`, is larger than the largest, `max_coeff`"),
        "{bounds}"
    );
}
