//! What an engine holds: parameters by their names, and memory of a GPU.

use zero_partition::Kind;

use crate::engine::Engine;
use crate::error::Error;

impl Engine {
    /// The most bytes of its GPU that this process has used at a time, as the driver counts them; `None` on the processor.
    #[must_use]
    pub fn peak_gpu_bytes(&self) -> Option<u64> {
        crate::device::peak(self.model().device())
    }

    /// The most bytes that the driver has reserved of the GPU for this process's tensors: what was in use, and what was freed and could not be
    /// used again at once; `None` on the processor.
    #[must_use]
    pub fn reserved_gpu_bytes(&self) -> Option<u64> {
        crate::device::reserved(self.model().device())
    }

    /// All values of a parameter in f32, on every rank; a collective.
    ///
    /// # Errors
    /// If there is no such parameter, or a rank is lost.
    pub fn full_parameter(&mut self, name: &str) -> Result<Vec<f32>, Error> {
        let id = self.parameter(name)?;
        Ok(self.zero.full(Kind::Parameter, id)?)
    }

    /// The values of a parameter that this rank's optimizer updates: (first element, values in f32). Empty if it updates none.
    ///
    /// # Errors
    /// If there is no such parameter.
    pub fn local_parameter(&self, name: &str) -> Result<(usize, Vec<f32>), Error> {
        let id = self.parameter(name)?;
        match self.zero.held_ranges(Kind::State(0)).into_iter().find(|range| range.parameter == id) {
            Some(range) => Ok((range.elements.start, self.zero.read(Kind::Parameter, &range)?)),
            None => Ok((0, vec![])),
        }
    }

    /// Overwrites a parameter on every rank; each gives all values.
    ///
    /// # Errors
    /// If there is no such parameter, or it has another number of elements.
    pub fn set_parameter(&mut self, name: &str, values: &[f32]) -> Result<(), Error> {
        let id = self.parameter(name)?;
        let elements = self.model().parameters()[id].elements();
        if values.len() != elements {
            return Err(Error::Batch(format!("{} values for `{name}`, which has {elements}", values.len())));
        }
        for range in self.zero.held_ranges(Kind::Parameter).into_iter().filter(|range| range.parameter == id) {
            self.zero.write(Kind::Parameter, &range, &values[range.elements.clone()])?;
        }
        Ok(())
    }

    fn parameter(&self, name: &str) -> Result<usize, Error> {
        let found = self.model().parameters().iter().position(|p| p.name() == name);
        found.ok_or_else(|| Error::NoParameter(name.to_string()))
    }
}
