//! Compression as a server does it that doesn't ask whether the client can read it.
//!
//! Each byte is written as a literal of deflate's fixed code (RFC 1951, 3.2.6): not smaller, but valid, and nothing of
//! the text can be read in it. No dependency of the tests can compress, and one for this alone would be too much.

/// The text as a gzip file (RFC 1952).
pub(super) fn compress(text: &[u8]) -> Vec<u8> {
    let mut file = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let mut bits = Vec::new();
    // A code's bits begin with its highest, all other fields with their lowest: here the last block, of the fixed code.
    bits.extend([true, true, false]);
    let mut code = |code: u16, length: u16| bits.extend((0..length).rev().map(|bit| code >> bit & 1 == 1));
    for &byte in text {
        match u16::from(byte) {
            byte @ 0..144 => code(0x30 + byte, 8),
            byte => code(0x190 + byte - 144, 9),
        }
    }
    // The end of the block.
    code(0, 7);
    let pack = |bits: &[bool]| (0..).zip(bits).map(|(place, &bit)| u8::from(bit) << place).sum::<u8>();
    file.extend(bits.chunks(8).map(pack));
    file.extend(crc32(text).to_le_bytes());
    file.extend(u32::try_from(text.len()).expect("short").to_le_bytes());
    file
}

fn crc32(bytes: &[u8]) -> u32 {
    let shift = |rest: u32, _| if rest & 1 == 1 { rest >> 1 ^ 0xedb8_8320 } else { rest >> 1 };
    !bytes.iter().fold(!0, |rest, &byte| (0..8).fold(rest ^ u32::from(byte), shift))
}
