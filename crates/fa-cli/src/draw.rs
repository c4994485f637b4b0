//! Drawings as SVG: plots, bars and diagrams.

pub(crate) mod bars;
pub(crate) mod chart;
pub(crate) mod diagram;
pub(crate) mod plot;
pub(crate) mod record;
