//! `mesh`: how data-parallel ranks are divided into shard groups (hybrid sharding, HSDP), and how many ranks share each
//! sequence.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::schema::*;
use crate::table::section;

section! {
    /// `mesh`. The keys have torchtitan's names.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct Mesh(keys) in "mesh" {
        pub data_parallel_replicate_degree: usize = engine(RANKS, "= data-parallel ranks / data_parallel_shard_degree, else 1", "Number of groups of ranks that each hold all ZeRO shards (HSDP); 1: all ranks of a pipeline stage form one group; auto: one group per host, unless data_parallel_shard_degree is a number") [is keys.facts().replicates];
        pub data_parallel_shard_degree: Option<usize> = engine(RANKS, "null", "Number of ranks across which ZeRO shards; ranks that share a sequence count as one; null: the data-parallel ranks / data_parallel_replicate_degree; auto: the ranks of a host, unless data_parallel_replicate_degree is a number") [or keys.facts().shards];
        pub context_parallel_degree: usize = key(RANKS, "1", "Number of consecutive ranks that share each sequence (context parallelism as in Llama 3). Each rank computes attention for the queries of two chunks, one from each end of the sequence, and gets the keys and values of the other ranks as `context_parallel_rotate_method` selects. Like `sequence_parallel_size`, but not limited by the number of heads");
        pub context_parallel_rotate_method: RotateMethod = key(RotateMethod::KIND, "allgather", "How ranks with `context_parallel_degree` above 1 get keys and values; allgather: each rank gathers those of all positions; alltoall: ring attention, in which ranks pass them from rank to rank");
        = rejected("tensor_parallel_degree", "1", "tensor parallelism has its own section").instead("`tensor_parallel.autotp_size` sets the number of ranks");
        = rejected("pipeline_parallel_degree", "1", "pipeline parallelism has its own section").instead("`pipeline.stages` sets the number of stages");
    }
}

choice! {
    /// How context-parallel ranks get the keys and values of other ranks.
    pub enum RotateMethod {
        /// Each rank gathers the keys and values of all positions.
        AllGather = "allgather",
        /// Ring attention: ranks pass keys and values from rank to rank.
        AllToAll = "alltoall",
    }
}
