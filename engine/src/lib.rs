//! ZeRO-style memory-optimized training engine for candle models
