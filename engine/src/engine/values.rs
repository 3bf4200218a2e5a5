//! Access to parameters by name, and the GPU memory of an engine.

use zero_partition::Kind;

use crate::engine::Engine;
use crate::error::Error;

impl Engine {
    /// Returns the peak GPU memory in use by this process, in bytes, as the driver counts it; `None` on the CPU.
    #[must_use]
    pub fn peak_gpu_bytes(&self) -> Option<u64> {
        crate::device::peak(self.model().device())
    }

    /// Returns the peak GPU memory, in bytes, that the driver reserved for this process's tensors: memory in use, and
    /// freed memory that it could not reuse at once. `None` on the CPU.
    #[must_use]
    pub fn reserved_gpu_bytes(&self) -> Option<u64> {
        crate::device::reserved(self.model().device())
    }

    /// Gathers a parameter and returns all of its values in f32 on every rank. Collective.
    ///
    /// # Errors
    /// Fails if the model has no such parameter or a rank is lost.
    pub fn full_parameter(&mut self, name: &str) -> Result<Vec<f32>, Error> {
        let id = self.parameter(name)?;
        Ok(self.zero.full(Kind::Parameter, id)?)
    }

    /// Returns whether the run keeps averaged weights (`training.ema`, or a schedule-free optimizer), and has averaged
    /// at least one step.
    #[must_use]
    pub fn has_averages(&self) -> bool {
        self.settings.zero.has_averages() && self.zero.updates() > 0
    }

    /// Runs `with` while the averaged weights replace the trainable parameters, for example to evaluate the averaged
    /// weights. Within `with`, steps, checkpoints and another exchange are errors, so the trained values do not change.
    /// Without averages, `with` runs on the weights. Collective: every rank calls it.
    ///
    /// # Errors
    /// Fails if a rank is lost or the disk fails, and returns the error of `with`. After an error the engine can
    /// neither train nor save, because other ranks may not have failed.
    pub fn with_averages<T>(&mut self, with: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if !self.has_averages() {
            return with(self);
        }
        self.has_own_weights("another exchange")?;
        self.has_exchanged = true;
        self.zero.exchange_averages()?;
        let result = with(self)?;
        self.zero.exchange_averages()?;
        self.has_exchanged = false;
        Ok(result)
    }

    /// Fails if the averages replace the weights; `what` names the operation that needs the weights.
    pub(crate) fn has_own_weights(&self, what: &str) -> Result<(), Error> {
        match self.has_exchanged {
            false => Ok(()),
            true => Err(Error::Exchanged { what: what.to_string() }),
        }
    }

    /// Returns the elements of a parameter that this rank's optimizer updates: the index of the first element, and the
    /// values in f32. The values are empty if this rank updates none. If the parameter is split across ranks, the
    /// elements are those of this rank's part; [`Parameter::runs`](zero_model::Parameter::runs) gives their positions
    /// in the whole parameter.
    ///
    /// # Errors
    /// Fails if the model has no such parameter.
    pub fn local_parameter(&self, name: &str) -> Result<(usize, Vec<f32>), Error> {
        let id = self.parameter(name)?;
        match self.zero.updated_ranges().into_iter().find(|range| range.parameter == id) {
            Some(range) => Ok((range.elements.start, self.zero.read(Kind::Parameter, &range)?)),
            None => Ok((0, vec![])),
        }
    }

    /// Overwrites a parameter. Every rank calls it and passes all values. The values are quantized if the parameter is.
    ///
    /// # Errors
    /// Fails if the model has no such parameter or the number of elements differs.
    pub fn set_parameter(&mut self, name: &str, values: &[f32]) -> Result<(), Error> {
        let id = self.parameter(name)?;
        let elements = self.model().parameters()[id].whole_elements();
        if values.len() != elements {
            let message = format!("got {} values for `{name}`, which has {elements} elements", values.len());
            return Err(Error::setting("Engine::set_parameter", message, "pass all values of the parameter"));
        }
        Ok(self.zero.write_parameter(id, values)?)
    }

    fn parameter(&self, name: &str) -> Result<usize, Error> {
        let found = self.model().parameters().iter().position(|p| p.name() == name);
        found.ok_or_else(|| Error::NoParameter(name.to_string()))
    }
}
