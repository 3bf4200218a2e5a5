//! What the commands print and refuse, and files that others wrote.

mod check;
mod checkpoint;
mod command_line;
mod deepspeed;
mod doctor;
mod instructions;
mod paths;
mod pretrained;
mod report;
