//! What an HTTP request is answered. Pure.

use super::text::CONTENT_TYPE;

const PAGE: &str = "kvctl: the metrics are at /metrics\n";
const PLAIN: &str = "text/plain; charset=utf-8";
const MAX_HEADERS: usize = 64;

/// What became of the bytes that came so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// The head of the request is not all there yet.
    More,
    /// It is, and this is asked for.
    Asked(Asked),
}

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    Metrics { head_only: bool },
    Page { head_only: bool },
    Unknown,
    OtherMethod,
    Nonsense,
}

/// Reads the head of a request; a body, which none of ours has, is not looked at.
pub(super) fn read(bytes: &[u8]) -> Read {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) => Read::More,
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.unwrap_or_default();
            Read::Asked(asked(
                request.method.unwrap_or_default(),
                path.split(['?', '#']).next().unwrap_or(path),
            ))
        }
        Err(_) => Read::Asked(Asked::Nonsense),
    }
}

fn asked(method: &str, path: &str) -> Asked {
    let head_only = method == "HEAD";
    match path {
        _ if !matches!(method, "GET" | "HEAD") => Asked::OtherMethod,
        "/metrics" => Asked::Metrics { head_only },
        "/" => Asked::Page { head_only },
        _ => Asked::Unknown,
    }
}

/// The whole answer. `metrics`: asked for where they are wanted; its error is the server's.
pub(super) fn answer(asked: Asked, metrics: impl FnOnce() -> Result<String, String>) -> String {
    match asked {
        Asked::Metrics { head_only } => match metrics() {
            Ok(text) => whole("200 OK", CONTENT_TYPE, &text, head_only),
            Err(error) => whole("500 Internal Server Error", PLAIN, &format!("{error}\n"), head_only),
        },
        Asked::Page { head_only } => whole("200 OK", PLAIN, PAGE, head_only),
        Asked::Unknown => whole("404 Not Found", PLAIN, PAGE, false),
        Asked::OtherMethod => whole("405 Method Not Allowed\r\nAllow: GET, HEAD", PLAIN, PAGE, false),
        Asked::Nonsense => whole("400 Bad Request", PLAIN, PAGE, false),
    }
}

fn whole(status: &str, content_type: &str, body: &str, head_only: bool) -> String {
    let length = body.len();
    let body = if head_only { "" } else { body };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart() {
        let head = |line: &str| read(format!("{line} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
        for (line, expected) in [
            ("GET /metrics", Asked::Metrics { head_only: false }),
            ("GET /metrics?x=1", Asked::Metrics { head_only: false }),
            ("HEAD /metrics", Asked::Metrics { head_only: true }),
            ("GET /", Asked::Page { head_only: false }),
            ("GET /metrics/", Asked::Unknown),
            ("GET /other", Asked::Unknown),
            ("POST /metrics", Asked::OtherMethod),
            ("DELETE /other", Asked::OtherMethod),
        ] {
            assert_eq!(head(line), Read::Asked(expected), "{line}");
        }
        assert_eq!(read(b"GET /metrics HTTP/1.1\r\nHost"), Read::More);
        assert_eq!(read(b""), Read::More);
        assert_eq!(read(b"\x16\x03\x01\x02\x00"), Read::Asked(Asked::Nonsense), "TLS");
    }

    #[test]
    fn answers_say_how_long_they_are_and_end() {
        let text = |asked| answer(asked, || Ok("m 1\n".to_owned()));
        assert_eq!(
            text(Asked::Metrics { head_only: false }),
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: 4\r\n\
             Connection: close\r\n\r\nm 1\n"
        );
        assert!(
            text(Asked::Metrics { head_only: true })
                .ends_with("Content-Length: 4\r\nConnection: close\r\n\r\n")
        );
        let failed =
            answer(Asked::Metrics { head_only: false }, || Err("the directory is not ours".to_owned()));
        assert!(
            failed.starts_with("HTTP/1.1 500 ") && failed.ends_with("\r\n\r\nthe directory is not ours\n")
        );
        assert!(text(Asked::OtherMethod).contains("\r\nAllow: GET, HEAD\r\n"));
        for (asked, status) in
            [(Asked::Unknown, "404"), (Asked::OtherMethod, "405"), (Asked::Nonsense, "400")]
        {
            assert!(text(asked).starts_with(&format!("HTTP/1.1 {status} ")), "{asked:?}");
        }
    }
}
