//! What must hold for any text: shared by the tests and by fuzzing.

use rbd::Location;

/// What stands behind `rbd:` is an image, which is written as it was read, or is refused with a reason.
pub fn location(text: &str) {
    let location = match Location::parse(text) {
        Ok(location) => location,
        Err(problem) => return assert!(!problem.is_empty()),
    };
    for name in [
        Some(&location.pool),
        location.namespace.as_ref(),
        Some(&location.image),
    ] {
        let name = name.map_or("n", |name| name.as_str());
        assert!(!name.is_empty() && name.len() < 96 && !name.chars().any(char::is_control));
    }
    let written = location.option_text();
    assert_eq!(
        Location::parse(&written).as_ref(),
        Ok(&location),
        "{written}"
    );
    assert!(location.is_same_image(&location));
    // What is shown has none of the options, among which there may be a key.
    assert!(location.to_string().len() <= 4 * 100);
}
