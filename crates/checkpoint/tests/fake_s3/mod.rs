//! A small S3 on loopback: what copies of checkpoints ask of one, and faults.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// What the server has, and what it has been asked.
#[derive(Default)]
pub struct Bucket {
    /// Objects by bucket and key.
    pub objects: BTreeMap<String, Vec<u8>>,
    uploads: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    /// Requests, such as `PUT part`.
    pub asked: BTreeMap<String, usize>,
    /// Requests that are answered with 500.
    pub sick: usize,
    /// The connection breaks in the middle of every part and of every object.
    pub torn: bool,
}

/// The server; it ends with the process.
pub struct Server {
    /// Where it listens.
    pub endpoint: String,
    /// What it has.
    pub bucket: Arc<Mutex<Bucket>>,
}

struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Server {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let bucket = Arc::<Mutex<Bucket>>::default();
        let shared = bucket.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let bucket = shared.clone();
                // An end of the connection ends the conversation, no more.
                thread::spawn(move || while serve(&stream, &bucket).is_some() {});
            }
        });
        Self { endpoint, bucket }
    }

    /// What a program must have in its environment to find it.
    pub fn settings(&self) -> [(String, String); 5] {
        let of = |(name, value): (&str, &str)| (name.into(), value.into());
        [
            ("AWS_ENDPOINT", &*self.endpoint),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_REGION", "us-east-1"),
        ]
        .map(of)
    }
}

fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let hex = [rest.next().unwrap(), rest.next().unwrap()];
                u8::from_str_radix(std::str::from_utf8(&hex).unwrap(), 16).unwrap()
            }
            other => other,
        });
    }
    String::from_utf8(bytes).unwrap()
}

fn read(stream: &TcpStream, bucket: &Mutex<Bucket>) -> Option<Request> {
    let mut input = BufReader::new(stream);
    let mut line = String::new();
    input.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let query = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let query: BTreeMap<_, _> = query.map(|(name, value)| (name.to_owned(), unescaped(value))).collect();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        input.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let len: usize = headers.get("content-length").map_or(0, |len| len.parse().unwrap());
    let whole = !(bucket.lock().unwrap().torn && method == "PUT" && len > 0);
    let mut body = vec![0; if whole { len } else { len / 2 }];
    input.read_exact(&mut body).ok()?;
    // Dropped in the middle of the body.
    whole.then(|| Request { method, path: unescaped(path).trim_start_matches('/').into(), query, headers, body })
}

/// One request; none: the connection is over.
fn serve(stream: &TcpStream, bucket: &Mutex<Bucket>) -> Option<()> {
    let request = read(stream, bucket)?;
    let (status, headers, body) = answer(&request, &mut bucket.lock().unwrap());
    let len =
        headers.iter().find(|(name, _)| *name == "Content-Length").map_or(body.len().to_string(), |h| h.1.clone());
    let mut head = format!("HTTP/1.1 {status}\r\nContent-Length: {len}\r\n");
    for (name, value) in headers.iter().filter(|(name, _)| *name != "Content-Length") {
        write!(head, "{name}: {value}\r\n").unwrap();
    }
    let mut out = stream;
    out.write_all(head.as_bytes()).ok()?;
    out.write_all(b"\r\n").ok()?;
    if request.method != "HEAD" {
        out.write_all(&body).ok()?;
    }
    Some(())
}

type Answer = (&'static str, Vec<(&'static str, String)>, Vec<u8>);

fn tagged() -> Vec<(&'static str, String)> {
    vec![("ETag", "\"tag\"".into()), ("Last-Modified", "Mon, 30 Nov 2026 08:00:00 GMT".into())]
}

fn answer(request: &Request, bucket: &mut Bucket) -> Answer {
    let Request { method, path, query, headers, body } = request;
    let what = match (method.as_str(), query.get("uploadId"), query.contains_key("uploads")) {
        ("PUT", Some(_), _) => "PUT part",
        ("PUT", ..) if headers.contains_key("x-amz-copy-source") => "PUT copy",
        ("POST", _, true) => "POST begin",
        ("POST", Some(_), _) => "POST complete",
        ("DELETE", Some(_), _) => "DELETE upload",
        ("GET", ..) if query.contains_key("list-type") => "GET list",
        ("GET", ..) if headers.contains_key("range") => "GET range",
        (other, ..) => other,
    };
    *bucket.asked.entry(what.into()).or_default() += 1;
    if !headers.contains_key("authorization") {
        return ("403 Forbidden", Vec::new(), b"<Error><Code>AccessDenied</Code></Error>".into());
    }
    if bucket.sick > 0 {
        bucket.sick -= 1;
        return ("500 Internal Server Error", Vec::new(), b"<Error><Code>InternalError</Code></Error>".into());
    }
    let missing = ("404 Not Found", Vec::new(), b"<Error><Code>NoSuchKey</Code></Error>".to_vec());
    let done = |text: &str| ("200 OK", tagged(), text.as_bytes().to_vec());
    let upload = query.get("uploadId").cloned().unwrap_or_default();
    match what {
        "PUT" => {
            bucket.objects.insert(path.clone(), body.clone());
            done("")
        }
        "PUT copy" => {
            match bucket.objects.get(unescaped(&headers["x-amz-copy-source"]).trim_start_matches('/')).cloned() {
                Some(bytes) => {
                    bucket.objects.insert(path.clone(), bytes);
                    done("<CopyObjectResult><ETag>\"tag\"</ETag></CopyObjectResult>")
                }
                None => missing,
            }
        }
        "POST begin" => {
            let id = format!("upload-{}", bucket.asked[what]);
            bucket.uploads.insert(id.clone(), BTreeMap::new());
            done(&format!("<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"))
        }
        "PUT part" => match bucket.uploads.get_mut(&upload) {
            Some(parts) => {
                parts.insert(query["partNumber"].parse().unwrap(), body.clone());
                ("200 OK", tagged(), Vec::new())
            }
            None => missing,
        },
        "POST complete" => match bucket.uploads.remove(&upload) {
            Some(parts) => {
                bucket.objects.insert(path.clone(), parts.into_values().flatten().collect());
                done("<CompleteMultipartUploadResult><ETag>\"tag\"</ETag></CompleteMultipartUploadResult>")
            }
            None => missing,
        },
        "DELETE upload" => {
            bucket.uploads.remove(&upload);
            ("204 No Content", Vec::new(), Vec::new())
        }
        "DELETE" => {
            bucket.objects.remove(path);
            ("204 No Content", Vec::new(), Vec::new())
        }
        "GET list" => {
            let name = path.trim_end_matches('/');
            let begins = format!("{name}/{}", query.get("prefix").map_or("", |prefix| prefix));
            let mut text = String::from("<ListBucketResult><IsTruncated>false</IsTruncated>");
            for (key, bytes) in bucket.objects.iter().filter(|(key, _)| key.starts_with(&begins)) {
                let (key, size) = (&key[name.len() + 1..], bytes.len());
                write!(text, "<Contents><Key>{key}</Key><LastModified>2026-11-30T08:00:00.000Z</LastModified><ETag>\"tag\"</ETag><Size>{size}</Size></Contents>").unwrap();
            }
            done(&(text + "</ListBucketResult>"))
        }
        _ => {
            let Some(bytes) = bucket.objects.get(path) else { return missing };
            let mut headers = tagged();
            if method == "HEAD" {
                headers.push(("Content-Length", bytes.len().to_string()));
                return ("200 OK", headers, Vec::new());
            }
            let Some(range) = request.headers.get("range") else { return ("200 OK", headers, bytes.clone()) };
            let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse::<usize>().unwrap().min(bytes.len() - 1));
            headers.push(("Content-Range", format!("bytes {from}-{to}/{}", bytes.len())));
            ("206 Partial Content", headers, bytes[from..=to].to_vec())
        }
    }
}
