//! Shapes of models, for the other tests.

use zero_pipeline::{LayerShape, ModelShape, SegmentShape, Tiers, ZeroStage};

/// Returns a layer that uses these segments.
pub(crate) fn layer(name: impl Into<String>, segments: Vec<usize>) -> LayerShape {
    LayerShape {
        name: name.into(),
        read_backward: segments.clone(),
        segments,
        splits: true,
        reads_batch: false,
        exchanges: zero_pipeline::Exchanges::default(),
    }
}

/// Returns a trainable segment in memory.
pub(crate) fn segment(elements: usize, zero_stage: ZeroStage) -> SegmentShape {
    SegmentShape {
        elements,
        placements: zero_stage.placements(),
        tiers: Tiers::default(),
        has_secondary: false,
        is_trainable: true,
    }
}

/// Returns layers with a segment of ten elements each.
pub(crate) fn shape(layers: usize, zero_stage: ZeroStage) -> ModelShape {
    ModelShape {
        layers: (0..layers).map(|index| layer(format!("layer.{index}"), vec![index])).collect(),
        segments: vec![segment(10, zero_stage); layers],
    }
}
