//! A training step as a program: instructions, schedules, validator. Pure data
