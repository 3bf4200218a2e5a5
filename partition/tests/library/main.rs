//! Tests of layouts, of passes, and of the programs that the validator accepts. One file per subject.

mod layout;
mod mutations;
mod outer;
mod passes;

use zero_pipeline::{
    LayerShape, ModelShape, Placement, Program, SegmentShape, Stages, Tiers, Violation, World, ZeroStage,
};

/// Validates programs on one pipeline stage.
fn validate(programs: &[Program], shape: &ModelShape) -> Result<(), Violation> {
    let stages = Stages::single(shape);
    zero_pipeline::validate(programs, &World::data_parallel(shape, &stages, programs.len()))
}

/// Creates a layer. `embed` is an embedding table: its backward reads no parameters.
fn layer(name: &str, segments: &[usize]) -> LayerShape {
    LayerShape {
        name: name.into(),
        segments: segments.to_vec(),
        read_backward: if name == "embed" { vec![] } else { segments.to_vec() },
        splits: false,
        reads_batch: false,
        exchanges: zero_pipeline::Exchanges::default(),
    }
}

/// Creates a segment. If `stays`, its parameters stay gathered at stage 3.
fn segment(zero_stage: ZeroStage, elements: usize, stays: bool) -> SegmentShape {
    let mut placements = zero_stage.placements();
    if stays {
        placements.parameters = Placement::Replicated;
    }
    SegmentShape { elements, placements, tiers: Tiers::default(), has_secondary: false, is_trainable: true }
}

/// Gives secondary shards to all segments with sharded parameters.
fn with_secondary(mut shape: ModelShape) -> ModelShape {
    for segment in &mut shape.segments {
        segment.has_secondary = segment.placements.parameters == Placement::Sharded;
    }
    shape
}
