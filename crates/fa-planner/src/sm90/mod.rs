//! SM90 (Hopper): the tuning guide's model of tiles and matrix products, and the exact account beside it.

pub mod layout;
