//! Layers, removable parameters, differentiable fused operations and a model zoo for candle
