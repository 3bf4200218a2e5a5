//! Decides which of a rank's values are in host memory and which are in the memory of the GPU that runs its layers.

use crate::layout::Layout;
use crate::options::OnGpu;
use crate::segment::Segment;

impl OnGpu {
    /// Returns whether the state of each segment is on the GPU. The segments of the first layers go to the host, until
    /// the host has its share.
    #[must_use]
    pub fn residents(&self, layout: &Layout) -> Vec<bool> {
        let elements: Vec<usize> = layout.segments().iter().map(Segment::elements).collect();
        let on_host = (1.0 - self.states) * elements.iter().sum::<usize>() as f64;
        let ends = elements.iter().scan(0, |end, elements| {
            *end += elements;
            Some(*end)
        });
        // A segment that straddles the boundary goes to the side that has its larger part.
        ends.zip(&elements).map(|(end, &elements)| end as f64 - elements as f64 / 2.0 > on_host).collect()
    }
}
