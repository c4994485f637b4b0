//! Writes the generated headers into the `cuda` folder: `cargo xtask codegen`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    for header in fa_kernels::generated() {
        let path = folder.join(header.path);
        if std::fs::read_to_string(&path).is_ok_and(|text| text == header.text) {
            continue;
        }
        std::fs::write(&path, header.text)?;
        println!("wrote {}", header.path);
    }
    Ok(())
}
