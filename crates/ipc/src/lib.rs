//! Ranks that agree: how a coordinator process maps and unmaps pages on the worker ranks that own
//! the GPU mappings (tensor and pipeline parallel engines).
//!
//! This room is empty on purpose. It will hold a sans-I/O protocol core
//! (`step(state, event) -> (state, effects)`), its wire format and its transports. Until then an
//! engine runs with its scheduler and its one worker in one process, where the pool calls the
//! mapper directly, and engines of several ranks are refused by name.
