//! Output and errors of the commands, and files from other programs.

mod bad_input;
mod check;
mod checkpoint;
mod command_line;
mod data;
mod deepspeed;
mod doctor;
mod ended_runs;
mod generate;
mod instructions;
mod paths;
mod pretrained;
mod report;
