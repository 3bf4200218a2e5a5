//! What is left when ranks are killed, and how a run goes on.

mod kills;
mod restart;
mod saves;
