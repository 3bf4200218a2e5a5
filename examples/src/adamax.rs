//! Adamax (Kingma & Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 2), an optimizer that zero-train
//! does not include.

use zero_train::optimizer::{CustomOptimizer, CustomStep, Update};

/// Adamax, as in `torch.optim.Adamax`.
#[derive(Debug)]
pub(crate) struct Adamax {
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f32,
}

impl CustomOptimizer for Adamax {
    fn states(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_inf"]
    }

    fn update(&self, step: &CustomStep, Update { params, grads, states, .. }: Update<'_>) {
        let [exp_avg, exp_inf] = states else { unreachable!("there are two states") };
        let (beta1, beta2) = self.betas;
        let rate = (step.lr / (1.0 - beta1.powf(step.step as f64))) as f32;
        for (i, (param, grad)) in params.iter_mut().zip(grads).enumerate() {
            let grad = grad + step.weight_decay as f32 * *param;
            exp_avg[i] += (1.0 - beta1) as f32 * (grad - exp_avg[i]);
            exp_inf[i] = (beta2 as f32 * exp_inf[i]).max(grad.abs() + self.eps);
            *param -= rate * exp_avg[i] / exp_inf[i];
        }
    }
}
