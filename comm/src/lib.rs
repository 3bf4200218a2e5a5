//! Collectives and point-to-point transports between ranks: threads, shared memory, TCP
