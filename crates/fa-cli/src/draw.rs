//! Drawings as SVG: plots, bars and diagrams.

pub mod bars;
pub mod chart;
pub mod diagram;
pub mod plot;
