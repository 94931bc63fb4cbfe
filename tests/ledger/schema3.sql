-- The ledger's schema as version 3 wrote it: such files are read as they are, and upgraded by a resume.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE intervals (
  role TEXT NOT NULL, resource TEXT NOT NULL, t0 REAL NOT NULL, t1 REAL NOT NULL, state TEXT NOT NULL,
  cause TEXT NOT NULL, units REAL NOT NULL, price REAL NOT NULL);
CREATE TABLE events (t REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, fields TEXT NOT NULL);
CREATE TABLE trajectories (
  id TEXT NOT NULL, domain TEXT NOT NULL, outcome TEXT NOT NULL, v0 INTEGER NOT NULL, engine_seconds REAL NOT NULL,
  turns INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, action_tokens INTEGER NOT NULL, success INTEGER, score REAL,
  purpose TEXT NOT NULL, first_tokens INTEGER NOT NULL, reset_s REAL NOT NULL, env_s REAL NOT NULL,
  t0 REAL NOT NULL, t1 REAL NOT NULL);
CREATE TABLE invocations (
  function TEXT NOT NULL, provider TEXT NOT NULL, worker TEXT NOT NULL, t0 REAL NOT NULL, t1 REAL NOT NULL,
  cold_start_s REAL NOT NULL, billed_s REAL NOT NULL, memory_mb INTEGER NOT NULL, items INTEGER NOT NULL,
  status TEXT NOT NULL, cause TEXT NOT NULL, provider_id TEXT NOT NULL);
CREATE TABLE savings (
  function TEXT NOT NULL, stage TEXT NOT NULL, t REAL NOT NULL, items INTEGER NOT NULL, billed_s REAL NOT NULL,
  memory_mb INTEGER NOT NULL);
CREATE TABLE groups (
  id TEXT PRIMARY KEY, domain TEXT NOT NULL, seed INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0,
  reason TEXT NOT NULL DEFAULT '', version INTEGER);
CREATE TABLE samples (
  id TEXT PRIMARY KEY, grp TEXT NOT NULL, domain TEXT NOT NULL, v0 INTEGER NOT NULL, tokens INTEGER NOT NULL,
  action_tokens INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0, version INTEGER, payload BLOB, segment INTEGER,
  offset INTEGER);
CREATE INDEX samples_of_group ON samples (grp);
CREATE TABLE versions (version INTEGER PRIMARY KEY, step INTEGER NOT NULL, groups INTEGER NOT NULL,
  samples INTEGER NOT NULL, tokens INTEGER NOT NULL, metrics TEXT NOT NULL);
INSERT INTO meta VALUES ('schema_version', '3');
