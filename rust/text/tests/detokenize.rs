//! Detokenizing token by token: the pieces joined are the text, characters come whole and at once, stops never leak.

#![allow(clippy::unwrap_used)]

mod common;

use cbrs_text::{StopStrings, TextOffsets, TextStream, Tokenizer};
use common::{BANGBANG, E4_BD, END, HELLO, NEWLINE, SPACE_C3, WORLD, byte_level, spm, spm_byte, spm_word};
use proptest::prelude::*;

fn no_stops() -> StopStrings {
    StopStrings::default()
}

/// What each token, and then the end, adds.
fn pieces(tokenizer: &Tokenizer, stops: &[&str], ids: &[i32]) -> Vec<String> {
    let mut stream = TextStream::new(tokenizer.clone(), StopStrings::new(stops).unwrap(), true);
    let mut pieces = Vec::new();
    for &id in ids {
        stream.push(id);
        pieces.push(stream.take_delta().to_owned());
    }
    stream.finish();
    pieces.push(stream.take_delta().to_owned());
    assert_eq!(pieces.concat(), stream.into_text());
    pieces
}

fn bytes(text: &[u8]) -> Vec<i32> {
    text.iter().map(|&byte| i32::from(byte)).collect()
}

#[test]
fn f01_nothing_of_a_stop_string_is_shown() {
    let tokenizer = byte_level();
    assert_eq!(pieces(&tokenizer, &["DEFG"], &bytes(b"aDEFGh")), ["a", "", "", "", "", "", ""]);
    assert_eq!(pieces(&tokenizer, &["DEFG"], &bytes(b"aDEFh")), ["a", "", "", "", "DEFh", ""]);
    assert_eq!(pieces(&tokenizer, &["DEFG"], &bytes(b"aDEF")), ["a", "", "", "", "DEF"]);
}

#[test]
fn f05_a_long_stream_of_words_and_then_split_syllables_never_panics() {
    let tokenizer = byte_level();
    let mut ids = vec![WORLD; 10];
    ids.extend(bytes("안녕하세요 세계".as_bytes()));
    let pieces = pieces(&tokenizer, &[], &ids);
    assert_eq!(pieces.concat(), format!("{}안녕하세요 세계", " world".repeat(10)));
    let tokenizer = spm();
    let mut ids = vec![spm_word("▁word"); 10];
    ids.extend("녕하세".bytes().map(spm_byte));
    ids.push(spm_word("안"));
    let text = format!("word{}녕하세안", " word".repeat(9));
    assert_eq!(self::pieces(&tokenizer, &[], &ids).concat(), text);
    assert_eq!(tokenizer.decode(&ids, true), text);
}

#[test]
fn f06_a_character_of_two_bytes_comes_once_and_whole() {
    assert_eq!(pieces(&byte_level(), &[], &bytes(b"\xC4\x8F")), ["", "ď", ""]);
    assert_eq!(pieces(&spm(), &[], &[spm_byte(0xC4), spm_byte(0x8F)]), ["", "ď", ""]);
    assert_eq!(pieces(&byte_level(), &[], &[SPACE_C3, 0xA9, E4_BD, 0xA0]), [" ", "é", "", "你", ""]);
}

#[test]
fn f08_each_token_that_completes_a_character_gives_it_out_at_once() {
    let text = "The quick brown fox jumps over the lazy dog, again";
    let pieces = pieces(&byte_level(), &["never there"], &bytes(text.as_bytes()));
    assert_eq!(text.len(), 50);
    // An "n" could begin the stop string: it waits for one more token.
    let waiting = |index: usize| text.as_bytes()[index] == b'n';
    for (index, piece) in pieces[..50].iter().enumerate() {
        let expected = match (index > 0 && waiting(index - 1), waiting(index)) {
            (false, true) => String::new(),
            (true, false) => text[index - 1..=index].to_owned(),
            _ => text[index..=index].to_owned(),
        };
        assert_eq!(*piece, expected, "token {index}");
    }
    assert_eq!(pieces.concat(), text);
}

#[test]
fn f10_leading_and_repeated_spaces_are_kept() {
    let tokenizer = spm();
    let ids = [spm_word("▁the"), spm_word("▁▁▁▁"), spm_word("a"), spm_word("▁"), spm_word("▁word")];
    assert_eq!(pieces(&tokenizer, &[], &ids).concat(), "the    a  word");
    assert_eq!(tokenizer.decode(&ids, true), "the    a  word");
    assert_eq!(pieces(&tokenizer, &[], &[spm_word("▁▁▁▁"), spm_word("a")]), ["   ", "a", ""]);
}

#[test]
fn f17_added_tokens_outside_the_byte_alphabet_are_their_own_text() {
    let ids = [HELLO, NEWLINE, BANGBANG, WORLD];
    assert_eq!(pieces(&byte_level(), &[], &ids), ["hello", "\n", "‼", " world", ""]);
    assert_eq!(byte_level().decode(&ids, true), "hello\n‼ world");
}

#[test]
fn bytes_that_never_become_a_character_are_flushed_as_the_full_decoding_does() {
    assert_eq!(pieces(&byte_level(), &[], &[E4_BD]), ["", "\u{FFFD}"]);
    assert_eq!(pieces(&byte_level(), &[], &[E4_BD, HELLO]), ["", "\u{FFFD}hello", ""]);
    assert_eq!(pieces(&byte_level(), &[], &[0xFF, E4_BD]), ["\u{FFFD}", "", "\u{FFFD}"]);
    let ids = [spm_byte(0xE4), spm_byte(0xBD), spm_word("a")];
    assert_eq!(pieces(&spm(), &[], &ids), ["", "", "\u{FFFD}\u{FFFD}a", ""]);
}

#[test]
fn special_tokens_and_ids_without_a_token_add_nothing() {
    let ids = [HELLO, END, -1, 263, i32::MAX, WORLD];
    assert_eq!(pieces(&byte_level(), &[], &ids).concat(), "hello world");
    assert_eq!(byte_level().decode(&ids, false), "hello<|end|> world");
}

#[test]
fn a_stop_string_is_found_across_token_borders_and_ends_the_text() {
    let tokenizer = byte_level();
    assert_eq!(pieces(&tokenizer, &["lo wo"], &[HELLO, WORLD, HELLO]), ["hel", "", "", ""]);
    assert_eq!(pieces(&tokenizer, &["é!", "你"], &[HELLO, SPACE_C3, 0xA9, E4_BD, 0xA0, 33]).concat(), "hello é");
    let mut stream = TextStream::new(tokenizer, StopStrings::new(&["world", "wor"]).unwrap(), true);
    stream.push(WORLD);
    assert_eq!(stream.stopped().map(|stop| &**stop), Some("wor"));
    stream.push(HELLO);
    stream.finish();
    assert_eq!(stream.into_text(), " ");
}

#[test]
fn a_primed_stream_continues_its_prompt() {
    let mut stream = TextStream::new(spm(), no_stops(), true);
    stream.prime(&[1, spm_word("▁the")]);
    stream.push(spm_word("▁word"));
    assert_eq!(stream.shown(), " word");
    let mut stream = TextStream::new(byte_level(), no_stops(), true);
    stream.prime(&[E4_BD]);
    stream.push(0xA0);
    assert_eq!(stream.shown(), "你");
}

/// The text of SentencePiece-style ids by definition: text pieces, and runs of bytes with one U+FFFD per invalid byte.
fn spm_reference(ids: &[i32]) -> String {
    let mut text = String::new();
    let mut run: Vec<u8> = Vec::new();
    let flush = |run: &mut Vec<u8>, text: &mut String| {
        for chunk in run.utf8_chunks() {
            text.push_str(chunk.valid());
            text.extend(chunk.invalid().iter().map(|_| '\u{FFFD}'));
        }
        run.clear();
    };
    for &id in ids {
        match id {
            3..=258 => run.push((id - 3) as u8),
            259.. => {
                flush(&mut run, &mut text);
                text.push_str(&common::SPM_WORDS[id as usize - 259].replace('▁', " "));
            }
            _ => {}
        }
    }
    flush(&mut run, &mut text);
    text.strip_prefix(' ').map(str::to_owned).unwrap_or(text)
}

/// Where the text must end by definition: the first end of any stop string, and of those the earliest start.
fn cut_reference(text: &str, stops: &[String]) -> (String, Option<String>) {
    for end in (1..=text.len()).filter(|&end| text.is_char_boundary(end)) {
        let found = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).max_by_key(|stop| stop.len());
        if let Some(stop) = found {
            return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
        }
    }
    (text.to_owned(), None)
}

fn check_stops(tokenizer: &Tokenizer, ids: &[i32], stops: &[String]) {
    let (expected, stop) = cut_reference(&tokenizer.decode(ids, true), stops);
    let mut stream = TextStream::new(tokenizer.clone(), StopStrings::new(stops).unwrap(), true);
    let mut joined = String::new();
    for &id in ids {
        stream.push(id);
        joined.push_str(stream.take_delta());
        assert!(expected.starts_with(&joined), "leaked: {joined:?} is no beginning of {expected:?}");
    }
    stream.finish();
    joined.push_str(stream.take_delta());
    assert_eq!(joined, expected);
    assert_eq!(stream.stopped().map(ToString::to_string), stop);
}

/// Few different bytes, so that characters and stop strings come about by chance.
fn byte_level_ids() -> impl Strategy<Value = Vec<i32>> {
    let byte = prop::sample::select(vec![97, 98, 32, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF]);
    let token = prop_oneof![6 => byte, 2 => 256..=262i32, 1 => 0..=255i32];
    prop::collection::vec(token, 0..60)
}

fn spm_ids() -> impl Strategy<Value = Vec<i32>> {
    let byte = prop::sample::select(vec![0x61u8, 0x20, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xFF]);
    let token = prop_oneof![4 => byte.prop_map(spm_byte), 4 => 259..267i32, 1 => 0..259i32];
    prop::collection::vec(token, 0..60)
}

fn stop_strings() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec("[ab é你\u{FFFD}\n]{1,4}", 0..5)
}

proptest! {
    #[test]
    fn byte_level_pieces_join_to_the_lossy_text_of_all_bytes(ids in byte_level_ids()) {
        let mut all = Vec::new();
        for &id in &ids {
            match id {
                0..=255 => all.push(id as u8),
                HELLO => all.extend(b"hello"),
                WORLD => all.extend(b" world"),
                SPACE_C3 => all.extend(b" \xC3"),
                E4_BD => all.extend(b"\xE4\xBD"),
                NEWLINE => all.extend(b"\n"),
                BANGBANG => all.extend("‼".as_bytes()),
                _ => {}
            }
        }
        let expected = String::from_utf8_lossy(&all);
        prop_assert_eq!(pieces(&byte_level(), &[], &ids).concat(), expected.as_ref());
        prop_assert_eq!(byte_level().decode(&ids, true), expected);
    }

    #[test]
    fn sentencepiece_pieces_join_to_the_text_by_definition(ids in spm_ids()) {
        prop_assert_eq!(pieces(&spm(), &[], &ids).concat(), spm_reference(&ids));
    }

    #[test]
    fn stop_strings_never_leak_from_byte_level_streams(ids in byte_level_ids(), stops in stop_strings()) {
        check_stops(&byte_level(), &ids, &stops);
    }

    #[test]
    fn stop_strings_never_leak_from_sentencepiece_streams(ids in spm_ids(), stops in stop_strings()) {
        check_stops(&spm(), &ids, &stops);
    }
}

/// As `pieces`, for a stream with further options.
fn pieces_of(mut stream: TextStream, ids: &[i32]) -> Vec<String> {
    let mut pieces = Vec::new();
    for &id in ids {
        stream.push(id);
        pieces.push(stream.take_delta().to_owned());
    }
    stream.finish();
    pieces.push(stream.take_delta().to_owned());
    pieces
}

#[test]
fn a_stop_string_that_is_kept_needs_no_holding_back_and_nothing_follows_it() {
    let stream =
        |stops: &[&str]| TextStream::new(byte_level(), StopStrings::new(stops).unwrap(), true).keeping_stop(true);
    assert_eq!(pieces_of(stream(&["DEFG"]), &bytes(b"aDEFGh")), ["a", "D", "E", "F", "G", "", ""]);
    assert_eq!(pieces_of(stream(&["o w"]), &[HELLO, WORLD, HELLO]), ["hello", " w", "", ""]);
    assert_eq!(pieces_of(stream(&["bc", "abc"]), &bytes(b"zabcd")), ["z", "a", "b", "c", "", ""]);
}

#[test]
fn g08_stop_strings_are_looked_for_after_min_tokens_with_nothing_matched() {
    let stream = |min_tokens, stops: &[&str]| {
        TextStream::new(byte_level(), StopStrings::new(stops).unwrap(), true).with_min_tokens(min_tokens)
    };
    assert_eq!(pieces_of(stream(2, &["ab"]), &bytes(b"ababz")), ["a", "b", "", "", "", ""]);
    // The first "a" came before: it is not the beginning of a match.
    assert_eq!(pieces_of(stream(1, &["ab"]), &bytes(b"abab")), ["a", "b", "", "", ""]);
    // A character belongs to the token that completes it.
    assert_eq!(pieces_of(stream(1, &["é"]), &bytes("éé".as_bytes())), ["", "", "", "", ""]);
    assert_eq!(pieces_of(stream(2, &["é"]), &bytes("éé".as_bytes())), ["", "é", "", "", ""]);
}

/// Where tokens begin in the characters of all their bytes, from the text as a whole: of the first character that a token has a byte of.
fn offsets_reference(tokens: &[Vec<u8>]) -> Vec<usize> {
    let bytes = tokens.concat();
    let mut char_of = Vec::new();
    let mut num_chars = 0;
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            char_of.extend(std::iter::repeat_n(num_chars, character.len_utf8()));
            num_chars += 1;
        }
        char_of.extend(std::iter::repeat_n(num_chars, chunk.invalid().len()));
        num_chars += usize::from(!chunk.invalid().is_empty());
    }
    char_of.push(num_chars);
    let starts = tokens.iter().scan(0, |start, token| Some(std::mem::replace(start, *start + token.len())));
    let starts: Vec<usize> = starts.collect();
    starts.into_iter().map(|start| char_of[start]).collect()
}

#[test]
fn tokens_begin_at_the_first_character_that_they_have_a_byte_of() {
    let offsets = |tokenizer: &Tokenizer, ids: &[i32]| {
        let mut offsets = TextOffsets::new(tokenizer.clone(), true);
        ids.iter().map(|&id| offsets.push(id)).collect::<Vec<_>>()
    };
    let tokenizer = byte_level();
    // "hello", a special one, " é" in two, "你" in two, a byte that never becomes a character, "‼"
    let ids = [HELLO, END, SPACE_C3, 0xA9, E4_BD, 0xA0, 0xE4, BANGBANG, HELLO];
    assert_eq!(offsets(&tokenizer, &ids), [0, 5, 5, 6, 7, 7, 8, 9, 10]);
    assert_eq!(tokenizer.decode(&ids, true), "hello é你\u{FFFD}‼hello");
    // "ab", two bytes that never become one, "b"; each becomes one here.
    let ids = [spm_word("a"), spm_word("b"), spm_byte(0xE4), spm_byte(0xBD), spm_word("b"), spm_word("b")];
    assert_eq!(offsets(&spm(), &ids), [0, 1, 2, 2, 4, 5]);
    assert_eq!(spm().decode(&ids, true), "ab\u{FFFD}\u{FFFD}bb");
}

#[test]
fn tokens_of_a_given_text_begin_in_it() {
    let tokenizer = byte_level();
    let text = "hello<|end|>你\nhello";
    let ids = tokenizer.encode(text, false).unwrap();
    let chars: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    let offsets = TextOffsets::of_text(&tokenizer, text, &ids);
    let mut at = 0;
    for (&id, offset) in ids.iter().zip(&offsets) {
        assert_eq!(chars.partition_point(|&start| start <= at) - 1, *offset, "token {id} at byte {at}");
        let mut bytes = Vec::new();
        tokenizer.push_token_bytes(id, &mut bytes);
        at += bytes.len();
    }
    assert_eq!(at, text.len());
    // As a BOS: it is not in the text.
    let with_added: Vec<i32> = std::iter::once(END).chain(tokenizer.encode("ab", false).unwrap()).collect();
    assert_eq!(TextOffsets::of_text(&tokenizer, "ab", &with_added), [0, 0, 1]);
}

proptest! {
    #[test]
    fn offsets_are_those_of_the_whole_text(ids in byte_level_ids()) {
        let tokenizer = byte_level();
        let bytes_of = |&id: &i32| {
            let mut bytes = Vec::new();
            if id != END {
                tokenizer.push_token_bytes(id, &mut bytes);
            }
            bytes
        };
        let tokens: Vec<Vec<u8>> = ids.iter().map(bytes_of).collect();
        let mut offsets = TextOffsets::new(tokenizer.clone(), true);
        let got: Vec<usize> = ids.iter().map(|&id| offsets.push(id)).collect();
        let expected = offsets_reference(&tokens);
        for (place, (got, expected)) in got.iter().zip(&expected).enumerate() {
            // What adds nothing begins where the text goes on, as far as that is known.
            if !tokens[place].is_empty() {
                prop_assert_eq!(got, expected, "token {} of {:?}", place, &ids);
            }
        }
    }
}
