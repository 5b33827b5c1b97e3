//! Stories of a whole group: the cores of coordinator and ranks in the simulator's world, which checks what must hold after every step.
//! Frames are lost, repeated and late, driver work fails, processes die; at the end everything comes to rest.
#![no_main]

use kvcached_ipc::sim::replay;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|story: &[u8]| {
    if let Err(violation) = replay(story) {
        panic!("{violation}");
    }
});
