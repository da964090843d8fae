//! precis
fn main() {}
