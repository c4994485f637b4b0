//! The example of continuous batching generates the tokens of one request at a time.

// Its `main` is a program's.
#[allow(dead_code)]
#[path = "../examples/continuous_batching.rs"]
mod continuous_batching;

use candle_core::Device;
use continuous_batching::{Model, Server, one_at_a_time, requests};

#[test]
fn tokens_are_those_of_one_request_at_a_time() {
    let model = Model::new(&Device::Cpu).unwrap();
    let requests = requests();
    let alone = one_at_a_time(&model, &requests).unwrap();
    // Few pages make requests wait for others to leave.
    for pages in [40, 12] {
        let (together, steps) = Server::new(&model, pages).unwrap().serve(&requests).unwrap();
        assert_eq!(together, alone, "{pages} pages");
        assert!(steps >= 30, "{steps}");
    }
    assert_eq!(alone.iter().map(Vec::len).collect::<Vec<_>>(), [12, 30, 8, 20, 16, 5, 10]);
    // The tokens differ: a model that repeats one shows nothing.
    assert!(alone[1].iter().collect::<std::collections::HashSet<_>>().len() > 4, "{:?}", alone);
}
