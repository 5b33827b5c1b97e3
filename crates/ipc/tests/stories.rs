//! Stories as the fuzzer tells them: any bytes are some course of events, and none breaks the protocol.

use kvcached_ipc::sim::replay;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn no_story_breaks_the_protocol(story in prop::collection::vec(any::<u8>(), 0..600)) {
        let world = replay(&story);
        prop_assert!(world.is_ok(), "{}", world.err().map(|violation| violation.0).unwrap_or_default());
    }
}
