//! Accessors of an engine, for reports, plans and training loops.

use std::sync::Arc;

use zero_comm::{Communicator, Stats};
use zero_config::Config;
use zero_model::Model;
use zero_model::memory::Exchanged;
use zero_model::ops::SequenceGroup;
use zero_optim::LossScaler;
use zero_partition::{DiskUse, ShardedState, expected_tensor_sum};
use zero_pipeline::{Content, LayerId, Program};

use super::Engine;
use crate::costs::forms::Table;
use crate::costs::overlap::Choice;
use crate::costs::subject::Subject;
use crate::executor::activation_offload::ActivationOffload;
use crate::settings::Settings;
use crate::stage_plan::StagePlan;
use crate::timing::Timing;
use crate::timing::profile::Profile;

impl Engine {
    /// Returns the loss scale of the next step; `None` without `fp16`.
    #[must_use]
    pub fn loss_scale(&self) -> Option<f64> {
        self.scaler.as_ref().map(LossScaler::scale)
    }

    /// Returns the number of optimizer steps so far, including skipped ones.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Returns the number of samples that all replicas have consumed so far. It is the index of the next step's first
    /// sample.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns the learning rate of the next step.
    #[must_use]
    pub fn lr(&self) -> f64 {
        let updates = self.zero.updates();
        let factor = self.model().lr_lambda().map_or(1.0, |factor| factor(updates));
        self.settings.schedule.lr(self.settings.base_lr, updates + 1) * factor
    }

    /// Returns the number of samples in the next step: `train_batch_size`, or fewer while `training.rampup_batch_size`
    /// increases it.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.config.batch_sizes().at(self.samples)
    }

    /// Returns the data-parallel degree. Ranks that share sequences count as one.
    #[must_use]
    pub fn replicas(&self) -> usize {
        self.stage_plan.whole.data_parallel()
    }

    /// Returns the index of the replica that this rank belongs to, which determines its part of the data. The index is
    /// less than [`Engine::replicas`]. Ranks that share sequences have the same index.
    #[must_use]
    pub fn replica(&self) -> usize {
        let whole = self.stage_plan.whole;
        whole.replica(whole.coordinates(self.comm.rank())) / whole.context()
    }

    /// Returns the configuration, resolved for this world.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> &Model {
        self.zero.model()
    }

    /// Returns this rank's communicator.
    #[must_use]
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// Returns the counters of all communication groups of this rank since the engine was created.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.zero.groups().stats()
    }

    /// Returns the payload bytes of a message with activations or their gradients, from the shapes of the last training
    /// step. The first micro-batch's message includes its announcement.
    pub fn message_bytes(&self, content: &Content) -> usize {
        let boundary = |layer: &LayerId| self.boundaries.get(layer).cloned().unwrap_or_default();
        match content {
            Content::Activations { layer, micro_batch: 0 } => {
                boundary(layer).bytes() + boundary(layer).announcement_bytes()
            }
            Content::Activations { layer, .. } => boundary(layer).bytes(),
            Content::Gradients { layer, micro_batch: 0 } => {
                boundary(layer).gradient_bytes() + boundary(layer).gradient_announcement_bytes()
            }
            Content::Gradients { layer, .. } => boundary(layer).gradient_bytes(),
            Content::TiedGradient { .. } | Content::TiedParameters { .. } => 0,
        }
    }

    /// Returns the bytes that this rank sends in a step to the other ranks of its context and tensor groups. `None` if
    /// a dry run cannot compute them.
    #[must_use]
    pub fn exchanged_bytes(&self) -> Option<Exchanged> {
        let Some(group) = &self.sequence else { return Some(Exchanged::default()) };
        let index = group.of_batch().map_or(0, SequenceGroup::index);
        let in_layers = Table::of_slice(&self.config, self.zero.model(), index)?.exchanged(&self.program);
        let groups = self.zero.groups();
        let summed = expected_tensor_sum(
            (self.zero.layout(), self.zero.stages()),
            groups.at(),
            (groups.tensor_index(), self.config.tensor_size()),
        );
        Some(Exchanged { tensor: in_layers.tensor + summed, ..in_layers })
    }

    /// Returns the time of this rank's steps by category.
    #[must_use]
    pub fn timing(&self) -> &Timing {
        &self.timing
    }

    /// Returns the program of the last training step; before the first step, the program of the first step.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Returns the settings derived from the configuration.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the pipeline stages, and the plan from which the programs of all ranks are built.
    #[must_use]
    pub fn stage_plan(&self) -> &StagePlan {
        &self.stage_plan
    }

    /// Returns whether communication overlaps with compute; `None` unless a cost table decided that.
    #[must_use]
    pub fn choice(&self) -> Option<Choice> {
        self.choice
    }

    /// Returns a one-line description of the transport between GPUs; `None` if values do not travel between GPUs.
    #[must_use]
    pub fn between_gpus(&self) -> Option<&str> {
        self.between_gpus.as_deref()
    }

    /// Returns the size and statistics of this rank's swap file of offloaded layer inputs; `None` without such a file.
    #[must_use]
    pub fn offloaded_inputs(&self) -> Option<DiskUse> {
        self.kept.as_ref().map(ActivationOffload::disk_use)
    }

    /// Starts counting the work of each layer.
    pub fn begin_profile(&mut self) {
        self.timing.begin_profile(self.zero.model().layers().len());
    }

    /// Returns the counts since [`Engine::begin_profile`]; `None` if that was not called.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.timing.take_profile()
    }

    /// Returns the programs of all stages for a training step.
    pub(crate) fn all_programs(&self) -> Vec<Program> {
        self.stage_plan.training(self.zero.layout().shape())
    }

    /// Calls `with` on the values that a plan of this engine depends on.
    pub(crate) fn planned<T>(&self, programs: &[Program], with: impl FnOnce(&Subject<'_>) -> T) -> T {
        with(&Subject {
            config: &self.config,
            settings: &self.settings,
            model: self.zero.model(),
            layout: self.zero.layout(),
            stage_plan: &self.stage_plan,
            programs,
        })
    }

    /// Returns this rank's sharded state: layout and tracked bytes.
    #[must_use]
    pub fn zero(&self) -> &ShardedState {
        &self.zero
    }
}
