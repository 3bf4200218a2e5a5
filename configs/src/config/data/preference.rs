//! `preference`: training on pairs of a chosen and a rejected answer.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::schema::*;
use crate::table::section;

section! {
    /// `preference`, with the names of TRL's `DPOConfig`, `ORPOConfig` and `CPOConfig`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Preference(keys) in "preference" {
        pub kind as "type": PreferenceType = key(PreferenceType::KIND, "dpo", "Method. dpo: compares with the initial model as the reference; orpo: adds the loss on the chosen answer, without a reference; simpo: compares mean log-probabilities, without a reference");
        pub beta: f64 = key(POSITIVE, "0.1", "β. dpo: larger values keep the model closer to the reference; orpo: weight of the odds-ratio term; simpo: factor of the difference of the mean log-probabilities");
        pub loss_type: DpoLoss = key(DpoLoss::KIND, "sigmoid", "Loss of `type: dpo`: sigmoid (DPO), hinge (SLiC), ipo (IPO), robust (with `label_smoothing`)");
        pub label_smoothing: f64 = key(Kind::Float(Range { min: 0.0, max: 0.5, above: false, below: true }), "0.0", "Probability that the two answers of a pair are swapped, for `loss_type: robust`");
        pub simpo_gamma: f64 = key(NON_NEGATIVE, "0.5", "γ: margin between the scaled mean log-probabilities, for `type: simpo`");
    }
}

choice! {
    /// Method of training on pairs.
    pub enum PreferenceType {
        /// Direct preference optimization.
        Dpo = "dpo",
        /// Odds ratio preference optimization.
        Orpo = "orpo",
        /// Simple preference optimization.
        SimPo = "simpo",
    }
}

choice! {
    /// Loss of direct preference optimization.
    pub enum DpoLoss {
        /// The logistic loss.
        Sigmoid = "sigmoid",
        /// The hinge loss.
        Hinge = "hinge",
        /// The squared distance to a margin.
        Ipo = "ipo",
        /// The logistic loss, corrected for pairs with swapped answers.
        Robust = "robust",
    }
}

impl Preference {
    /// Returns whether the loss compares the model with its initial state, the reference.
    #[must_use]
    pub fn has_reference(&self) -> bool {
        self.kind == PreferenceType::Dpo
    }
}
