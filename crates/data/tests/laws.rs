//! The law of `[data]` in run files.

use spec::Run;
use spec::run::{Packing, Source};

fn parse(data: &str) -> Result<Run, String> {
    let text = format!("[model]\npreset = \"nano\"\n[train]\nsteps = 1\nbatch = 2\nseq = 16\n[data]\n{data}");
    Run::parse(&text, "run.toml", &[], 1).map_err(|e| e.to_string())
}

#[test]
fn keys_of_tokens_and_mixtures_are_read() {
    let run =
        parse("source = \"tokens\"\npaths = [\"a\", \"b\"]\nweights = [2, 0.5]\npacking = \"bestfit\"").expect("fits");
    let data = &run.data;
    assert_eq!((data.source, data.packing, data.vocab), (Source::Tokens, Packing::BestFit, run.model.vocab));
    assert_eq!(data.weights, [2.0, 0.5]);
    let plain = parse("source = \"synthetic\"").expect("fits");
    assert_eq!((plain.data.packing, plain.data.weights.len()), (Packing::Stream, 0));
    // Keys that are not set do not enter the definition, so that older checkpoints stay of the same run.
    assert!(!plain.definition().contains("packing") && !plain.definition().contains("weights"));
    assert!(run.definition().contains("weights = [2.0, 0.5]"), "{}", run.definition());
}

#[test]
fn what_does_not_fit_is_refused_with_a_remedy() {
    let table = [
        ("source = \"tokens\"", "data tokenize"),
        ("source = \"token\"", "tokens"),
        ("source = \"text\"\npaths = [\"a\", \"b\"]\nweights = [1]", "1 numbers for 2 data.paths"),
        ("source = \"text\"\npaths = [\"a\", \"b\"]\nweights = [1, 0]", "each above 0"),
        ("source = \"text\"\npaths = [\"a\", \"b\"]\nweights = [1, -1]", "each above 0"),
        ("source = \"text\"\npaths = [\"a\", \"b\"]\nweights = [1, 1e-6]", "each above 0"),
        ("source = \"text\"\npaths = [\"a\"]\nweights = [nan]", "a list of numbers"),
        ("source = \"text\"\npaths = [\"a\"]\nweights = 1", "a list of numbers"),
        ("source = \"synthetic\"\nweights = [1]", "has none"),
        ("packing = \"best\"", "bestfit"),
        ("packing = \"bestfit\"\nmasks = false", "data.masks to true"),
        ("packng = \"bestfit\"", "data.packing"),
    ];
    for (data, expected) in table {
        let said = parse(data).expect_err(data);
        assert!(said.contains(expected), "{data}: {said}");
    }
}
