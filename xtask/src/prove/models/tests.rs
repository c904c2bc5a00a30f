use super::*;

fn search() -> (tempfile::TempDir, Search) {
    let folder = tempfile::tempdir().unwrap();
    let search = Search::new(folder.path().to_owned(), None).unwrap();
    (folder, search)
}

#[test]
fn some_models_train_to_the_numbers_of_one_rank_under_every_layout() {
    let (_folder, mut search) = search();
    let mut said = Vec::new();
    let plan = Plan { models: 6, seed: 1, time: None };
    let tally = search.run(plan, &mut |line| said.push(line.to_owned())).unwrap();
    assert_eq!(tally.faults, Vec::<String>::new(), "{}", said.join("\n"));
    assert_eq!(tally.models, 6);
    assert_eq!(tally.layouts(), 6 * LAYOUTS);
    assert!(tally.equal > 12, "{:#?}", tally.lines());
}

#[test]
fn a_number_names_its_model_and_most_models_are_accepted() {
    let (_folder, search) = search();
    let drawn = |number| draw::run_file(&mut Random::new(number), &search.corpora);
    assert_eq!(drawn(5), drawn(5));
    assert_ne!(drawn(5), drawn(6));
    let one = Asked { sets: vec!["layout.threads=1".into()], ..Asked::default() };
    let accepted = (0..200).filter(|number| checked(&drawn(*number), &one).is_ok()).count();
    assert!(accepted > 120, "{accepted} of 200");
}

/// The way to a fault: told with what repeats it, and smaller than it was.
#[test]
fn a_fault_is_told_with_a_smaller_case() {
    let (_folder, mut search) = search();
    let (drawn, end) = (0..)
        .find_map(|number| {
            let drawn = draw::run_file(&mut Random::new(number), &search.corpora);
            match search.reference(&drawn) {
                Ok((_, End::Trained(one))) => Some((drawn, one)),
                _ => None,
            }
        })
        .unwrap();
    // One rank that would have had other numbers.
    let reference = End::Trained(Box::new(super::super::launch::Finished { digest: "0".repeat(64), ..*end }));
    let asked = Asked { sets: vec!["layout.threads=2".into(), "layout.transport=threads".into()], ..Asked::default() };
    let Verdict::Fault(reason) = search.judge(&drawn, "", &reference, &asked) else { panic!("another digest") };
    assert!(reason.contains("for 000000000000"), "{reason}");
    let (mut tally, mut said) = (Tally::default(), Vec::new());
    search.fault(7, &drawn, Some(&asked), &reason, &mut tally, &mut |line| said.push(line.to_owned()));
    assert_eq!(tally.faults.len(), 1);
    let said = said.join("\n");
    assert!(said.contains("prove --models 1 --seed 7") && said.contains("lockstep train "), "{said}");
}
