//! What `top` shows, and what keys do to it.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::size::{NotUnderstood, size, size_or_none};
use crate::view::{Instance, Snapshot};
use crate::wish::Wish;

/// Longer is no size.
const MAX_INPUT_CHARS: usize = 24;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) snapshot: Snapshot,
    pub(crate) colours: bool,
    /// Index of the chosen instance.
    pub(crate) selected: usize,
    pub(crate) edit: Option<Edit>,
    /// What became of the last wish.
    pub(crate) message: String,
}

/// A size that is being typed.
#[derive(Debug)]
pub(crate) struct Edit {
    pub(crate) name: String,
    pub(crate) term: Term,
    pub(crate) input: String,
    /// Why what was typed was not taken.
    pub(crate) complaint: Option<NotUnderstood>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Term {
    Limit,
    Min,
}

/// What a key asks the program to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Nothing,
    Quit,
    /// Ask the instance of this name.
    Ask(String, Wish),
}

impl State {
    pub(crate) fn new(snapshot: Snapshot, colours: bool) -> Self {
        Self { snapshot, colours, selected: 0, edit: None, message: String::new() }
    }

    pub(crate) fn selected(&self) -> Option<&Instance> {
        self.snapshot.instances.get(self.selected)
    }

    /// Newer figures. The selection stays with its instance, or with its line where the instance has gone.
    pub(crate) fn update(&mut self, snapshot: Snapshot) {
        let selected = self.selected().map(|instance| instance.name.as_str());
        let line = snapshot.instances.iter().position(|instance| Some(instance.name.as_str()) == selected);
        let last_line = snapshot.instances.len().saturating_sub(1);
        self.selected = line.unwrap_or(self.selected).min(last_line);
        self.snapshot = snapshot;
    }

    pub(crate) fn key(&mut self, key: KeyEvent) -> Action {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Action::Quit } else { Action::Nothing };
        }
        match self.edit.take() {
            Some(edit) => self.key_of_edit(edit, key.code),
            None => self.key_of_table(key.code),
        }
    }

    fn key_of_table(&mut self, key: KeyCode) -> Action {
        match key {
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Up => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down if self.selected + 1 < self.snapshot.instances.len() => self.selected += 1,
            KeyCode::Char('l') => self.begin(Term::Limit),
            KeyCode::Char('m') => self.begin(Term::Min),
            _ => {}
        }
        Action::Nothing
    }

    fn begin(&mut self, term: Term) {
        let Some(name) = self.selected().map(|instance| instance.name.clone()) else { return };
        self.edit = Some(Edit { name, term, input: String::new(), complaint: None });
    }

    /// The edit goes on where it is put back.
    fn key_of_edit(&mut self, mut edit: Edit, key: KeyCode) -> Action {
        match key {
            KeyCode::Esc => return Action::Nothing,
            KeyCode::Enter => match edit.wish() {
                Ok(wish) => {
                    self.message = format!("asking {}", edit.name);
                    return Action::Ask(edit.name, wish);
                }
                Err(why) => edit.complaint = Some(why),
            },
            KeyCode::Backspace => {
                edit.input.pop();
                edit.complaint = None;
            }
            KeyCode::Char(typed) if typed.is_ascii_graphic() && edit.input.len() < MAX_INPUT_CHARS => {
                edit.input.push(typed);
                edit.complaint = None;
            }
            _ => {}
        }
        self.edit = Some(edit);
        Action::Nothing
    }
}

impl Edit {
    fn wish(&self) -> Result<Wish, NotUnderstood> {
        match self.term {
            Term::Limit => size_or_none(&self.input).map(Wish::Limit),
            Term::Min => size(&self.input).map(Wish::Min),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(names: &[&str]) -> Snapshot {
        let instances = names.iter().map(|name| Instance { name: (*name).to_owned(), ..Instance::default() });
        Snapshot { instances: instances.collect(), ..Snapshot::default() }
    }

    fn typed(state: &mut State, text: &str) -> Action {
        text.chars().fold(Action::Nothing, |_, key| state.key(KeyCode::Char(key).into()))
    }

    #[test]
    fn arrows_select_within_the_table() {
        let mut state = State::new(snapshot(&["a", "b"]), false);
        for (key, line) in [(KeyCode::Up, 0), (KeyCode::Down, 1), (KeyCode::Down, 1), (KeyCode::Up, 0)] {
            assert_eq!(state.key(key.into()), Action::Nothing);
            assert_eq!(state.selected, line);
        }
    }

    #[test]
    fn the_selection_stays_with_its_instance() {
        let mut state = State::new(snapshot(&["a", "b", "c"]), false);
        state.selected = 1;
        state.update(snapshot(&["0", "a", "b"]));
        assert_eq!(state.selected, 2);
        state.update(snapshot(&["0", "a"]));
        assert_eq!(state.selected, 1);
        state.update(snapshot(&[]));
        assert!(state.selected == 0 && state.selected().is_none());
        typed(&mut state, "l");
        assert!(state.edit.is_none(), "nobody's limit");
        state.update(snapshot(&["a"]));
        assert_eq!(state.selected, 0);
    }

    #[test]
    fn a_limit_and_a_minimum_are_typed() {
        let mut state = State::new(snapshot(&["a"]), false);
        typed(&mut state, "l1.5Gq");
        state.key(KeyCode::Backspace.into());
        let action = state.key(KeyCode::Enter.into());
        assert_eq!(action, Action::Ask("a".to_owned(), Wish::Limit(Some(3 << 29))));
        assert!(state.edit.is_none());
        assert_eq!(state.message, "asking a");
        typed(&mut state, "lnone");
        assert_eq!(state.key(KeyCode::Enter.into()), Action::Ask("a".to_owned(), Wish::Limit(None)));
        typed(&mut state, "m512M");
        assert_eq!(state.key(KeyCode::Enter.into()), Action::Ask("a".to_owned(), Wish::Min(512 << 20)));
    }

    #[test]
    fn what_is_no_size_can_be_corrected() {
        let mut state = State::new(snapshot(&["a"]), false);
        typed(&mut state, "mnone");
        assert_eq!(state.key(KeyCode::Enter.into()), Action::Nothing);
        assert_eq!(state.edit.as_ref().unwrap().complaint, Some(NotUnderstood::Size));
        state.key(KeyCode::Backspace.into());
        let edit = state.edit.as_ref().unwrap();
        assert_eq!((edit.input.as_str(), &edit.complaint), ("non", &None));
        typed(&mut state, &"9".repeat(100));
        assert_eq!(state.edit.as_ref().unwrap().input.len(), MAX_INPUT_CHARS);
        state.key(KeyCode::Esc.into());
        assert!(state.edit.is_none());
    }

    #[test]
    fn an_edit_is_of_the_instance_that_was_chosen() {
        let mut state = State::new(snapshot(&["a", "b"]), false);
        typed(&mut state, "l0");
        state.update(snapshot(&["b"]));
        assert_eq!(state.key(KeyCode::Enter.into()), Action::Ask("a".to_owned(), Wish::Limit(Some(0))));
    }

    #[test]
    fn q_and_ctrl_c_end() {
        let mut state = State::new(snapshot(&["a"]), false);
        let ctrl = |key| KeyEvent::new(KeyCode::Char(key), KeyModifiers::CONTROL);
        assert_eq!(typed(&mut state, "q"), Action::Quit);
        typed(&mut state, "l");
        assert_eq!(typed(&mut state, "q"), Action::Nothing, "a letter of what is typed");
        assert_eq!(state.key(ctrl('l')), Action::Nothing);
        assert_eq!(state.key(ctrl('c')), Action::Quit);
    }
}
