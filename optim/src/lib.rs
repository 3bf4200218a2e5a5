//! Optimizers, learning-rate schedules and gradient norms as functions over slices
