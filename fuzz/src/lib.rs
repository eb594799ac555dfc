//! What the fuzz targets share. It follows docs/format.md, not the encoders, so that the targets hold both against it.

pub mod blocks;
pub mod input;
pub mod memory;
pub mod object;
pub mod seal;
