//! Reads the order of search results from the response of a model.

/// Returns the indexes of `count` results in the order of the response, which contains each number from 1 to `count` exactly once
/// and nothing else, except brackets, commas and a code block around them. Anything else is no order: results that a model
/// omits, repeats or invents, and text that it repeats from a message.
#[must_use]
pub fn read_order(response: &str, count: usize) -> Option<Vec<usize>> {
    let text = response.trim();
    let block = text.strip_prefix("```").and_then(|text| text.strip_suffix("```"));
    let text = block.map_or(text, |block| block.strip_prefix("json").unwrap_or(block)).trim();
    let list = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let mut is_missing = vec![true; count];
    let mut order = Vec::with_capacity(count);
    for number in list.split(|c: char| c == ',' || c.is_whitespace()).filter(|number| !number.is_empty()) {
        let index = number.parse::<usize>().ok()?.checked_sub(1)?;
        if !std::mem::replace(is_missing.get_mut(index)?, false) {
            return None;
        }
        order.push(index);
    }
    (order.len() == count).then_some(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutation_is_an_order() {
        for response in ["[3, 1, 2]", "3,1,2", " 3 1\n2 ", "```json\n[3,1,2]\n```", "```\n3\n1\n2```"] {
            assert_eq!(read_order(response, 3), Some(vec![2, 0, 1]), "{response}");
        }
    }

    #[test]
    fn anything_else_is_no_order() {
        for response in [
            "",
            "[]",
            "[3, 1]",
            "[3, 1, 2, 4]",
            "[0, 1, 2]",
            "[3, 1, 1]",
            "[3, 1, 2, 2]",
            "[3, 1, -2]",
            "[3, 1, 2.0]",
            "[[3, 1, 2]]",
            "[\"3\", \"1\", \"2\"]",
            "{\"order\": [3, 1, 2]}",
            "The order is 3, 1, 2.",
            "3, 1, 2 because the third names the ferry",
            "99999999999999999999999, 1, 2",
        ] {
            assert_eq!(read_order(response, 3), None, "{response}");
        }
    }
}
